# Flags per kernel file: src/cpu/kernels/isa_<name>.cc.
