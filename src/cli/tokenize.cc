#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/commands.h"
#include "cli/load.h"
#include "cli/token_ids.h"

namespace k3::cli {
namespace {

struct TokenizeArgs {
  std::string model;
  std::string text;
  bool from_stdin = false, special = false, pieces = false, skip_special = false;
  std::vector<std::string> ids;
};

std::string read_stdin() {
  std::stringstream text;
  text << std::cin.rdbuf();
  return text.str();
}

// The tokenizer's own files suffice where there is no config.json (the vocabulary's folder alone).
Result<std::shared_ptr<const Tokenizer>> load_tokenizer(const std::string& dir) {
  int64_t vocab_size = INT32_MAX;
  if (Result<ModelConfig> config = load_model_config(dir); config.ok()) {
    vocab_size = config->vocab_size;
  }
  return Tokenizer::load(dir, vocab_size);
}

Status tokenize(const TokenizeArgs& args) {
  K3_ASSIGN_OR_RETURN(const auto tokenizer, load_tokenizer(args.model));
  const std::string text = args.from_stdin ? read_stdin() : args.text;
  const std::vector<int32_t> ids =
      args.special ? tokenizer->encode_with_special(text) : tokenizer->encode(text);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!args.pieces) {
      std::printf("%s%d", i == 0 ? "" : " ", ids[i]);
      continue;
    }
    const nlohmann::json piece = std::string(tokenizer->token_bytes(ids[i]));
    std::printf("%d\t%s\n", ids[i],
                piece.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  }
  if (!args.pieces) std::printf("\n");
  return {};
}

Status detokenize(const TokenizeArgs& args) {
  K3_ASSIGN_OR_RETURN(const auto tokenizer, load_tokenizer(args.model));
  std::string words;
  for (const std::string& word : args.ids) words += word + " ";
  std::stringstream in(args.ids.empty() ? read_stdin() : words);
  K3_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                      parse_token_ids(in, "token ids", tokenizer->vocab_size()));
  const std::string text = tokenizer->decode(ids, args.skip_special);
  std::fwrite(text.data(), 1, text.size(), stdout);
  return {};
}

}  // namespace

void add_tokenize(CLI::App* app, int* exit_code) {
  auto args = std::make_shared<TokenizeArgs>();
  add_flag_with_value(app, "--model,-m", args->model, "Directory with tiktoken.model")->required();
  CLI::Option* text = app->add_option("TEXT", args->text, "Text (absent: standard input)");
  add_switch(app, "--special", args->special, "Read special tokens spelt out in the text as such");
  add_switch(app, "--pieces", args->pieces, "One token a line with its text");
  app->callback([args, text, exit_code] {
    args->from_stdin = text->count() == 0;
    *exit_code = report(tokenize(*args));
  });
}

void add_detokenize(CLI::App* app, int* exit_code) {
  auto args = std::make_shared<TokenizeArgs>();
  add_flag_with_value(app, "--model,-m", args->model, "Directory with tiktoken.model")->required();
  app->add_option("IDS", args->ids, "Token ids (absent: standard input)");
  add_switch(app, "--skip-special-tokens", args->skip_special, "Leave special tokens out");
  app->callback([args, exit_code] { *exit_code = report(detokenize(*args)); });
}

}  // namespace k3::cli
