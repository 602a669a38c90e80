# One file per instruction set compiles the same kernels with that set's flags; which one runs is
# chosen at start (src/cpu/kernels/select.cc).
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set_source_files_properties(src/cpu/kernels/isa_avx2.cc PROPERTIES
    COMPILE_OPTIONS "-mavx2;-mfma;-O3")
  # GCC 12's own AVX-512 headers trip both warnings.
  set_source_files_properties(src/cpu/kernels/isa_avx512.cc PROPERTIES
    COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mfma;-mprefer-vector-width=512;-O3;-Wno-maybe-uninitialized;-Wno-uninitialized")
else()
  set_source_files_properties(src/cpu/kernels/isa_avx2.cc src/cpu/kernels/isa_avx512.cc PROPERTIES
    HEADER_FILE_ONLY ON)
endif()
set_source_files_properties(src/cpu/kernels/isa_portable.cc PROPERTIES COMPILE_OPTIONS "-O3")
