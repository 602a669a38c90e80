#include <editline/readline.h>
#include <unistd.h>

#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/load.h"
#include "cli/run_request.h"
#include "cli/sampling_args.h"
#include "text/chat.h"
#include "text/output_parser.h"
#include "text/py_json.h"

namespace k3::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char kHelp[] =
    "/help                 this list\n"
    "/reset                forget the conversation (the system message stays)\n"
    "/system TEXT          set the system message and start over\n"
    "/think on|off         think before answering\n"
    "/effort low|high|max  how much to think\n"
    "/temperature X        0 picks the most likely token\n"
    "/undo                 take back the last exchange\n"
    "/save FILE            write the conversation as JSON\n"
    "/load FILE            read one back\n"
    "/tokens               length of the conversation in tokens\n"
    "/exit                 leave (or Ctrl-D); Ctrl-C stops an answer\n";

struct ChatArgs {
  ModelArgs model;
  CapacityArgs capacity;
  SamplingArgs sampling;
  std::string system;
  std::string effort = "max";
  bool no_thinking = false;
  int64_t max_tokens = 0;
};

// Streams an answer to the terminal and keeps it for the history.
class ChatSink : public TokenSink {
 public:
  ChatSink(const std::shared_ptr<const Tokenizer>& tokenizer, bool thinking, bool colour,
           std::vector<std::string> stop)
      : parser_(tokenizer, thinking), colour_(colour), stop_(std::move(stop)) {}

  bool on_token(const TokenOutput& token) override {
    show(parser_.push(token.token));
    return stop_.matched() < 0;
  }
  void on_finish(const FinishInfo& info) override {
    show(parser_.finish());
    if (stop_.matched() < 0) write(&content, stop_.flush(), false);
    if (dim_) std::fputs("\033[0m", stdout);
    finish = info;
  }

  std::string reasoning, content, calls;
  FinishInfo finish;

 private:
  void show(const std::vector<OutputEvent>& events) {
    for (const OutputEvent& e : events) {
      switch (e.kind) {
        case OutputEvent::Kind::kReasoning:
          write(&reasoning, e.text, true);
          break;
        case OutputEvent::Kind::kContent:
          if (!reasoning.empty() && content.empty() && stop_.matched() < 0)
            std::fputc('\n', stdout);
          write(&content, stop_.push(e.text), false);
          break;
        case OutputEvent::Kind::kToolCallBegin:
          write(&calls, cat("\n[call ", e.text, " "), true);
          break;
        case OutputEvent::Kind::kToolCallArgs:
          write(&calls, e.text, true);
          break;
        case OutputEvent::Kind::kToolCallEnd:
          write(&calls, "]", true);
          break;
      }
    }
  }
  void write(std::string* into, const std::string& text, bool dim) {
    if (text.empty()) return;
    *into += text;
    if (colour_ && dim != dim_) {
      std::fputs(dim ? "\033[2m" : "\033[0m", stdout);
      dim_ = dim;
    }
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }

  OutputParser parser_;
  bool colour_, dim_ = false;
  StopMatcher stop_;
};

class Session {
 public:
  Session(ChatArgs args, LoadedModel model)
      : args_(std::move(args)),
        m_(std::move(model)),
        engine_(&m_.executor(), m_.engine),
        terminal_(isatty(STDIN_FILENO) == 1 && isatty(STDOUT_FILENO) == 1),
        colour_(isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr) {
    reset();
    if (terminal_) {
      std::setlocale(LC_CTYPE, "");
      rl_initialize();
      if (const char* home = std::getenv("HOME")) history_file_ = cat(home, "/.k3_chat_history");
      if (!history_file_.empty()) read_history(history_file_.c_str());
      std::fputs("/help lists the commands.\n", stdout);
    }
  }

  Status run() {
    std::string line;
    while (read_line(&line)) {
      if (line.empty()) continue;
      if (line[0] == '/') {
        if (!command(line)) return {};
        continue;
      }
      K3_RETURN_IF_ERROR(say(line));
    }
    return {};
  }

 private:
  void reset() {
    messages_ = Json::array();
    if (!args_.system.empty()) {
      messages_.push_back({{"role", "system"}, {"content", args_.system}});
    }
  }

  bool read_line(std::string* line) {
    if (!terminal_) return static_cast<bool>(std::getline(std::cin, *line));
    char* text = readline("> ");
    if (text == nullptr) {
      std::fputc('\n', stdout);
      return false;
    }
    *line = text;
    std::free(text);
    if (!line->empty()) {
      add_history(line->c_str());
      if (!history_file_.empty()) write_history(history_file_.c_str());
    }
    return true;
  }

  Result<std::vector<int32_t>> render() const {
    const Json body = {{"messages", messages_},
                       {"thinking", !args_.no_thinking},
                       {"reasoning_effort", args_.effort}};
    K3_ASSIGN_OR_RETURN(const ChatRequest request, parse_chat_request(body));
    return render_chat(request, *m_.tokenizer);
  }

  // An error in one exchange is told and the conversation stands as before it; only the engine's
  // own end is returned.
  Status say(const std::string& text) {
    messages_.push_back({{"role", "user"}, {"content", text}});
    const auto refuse = [this](const Status& status) {
      messages_.erase(messages_.size() - 1);
      std::fprintf(stderr, "k3: %s\n", status.message().c_str());
      return Status();
    };
    Result<std::vector<int32_t>> prompt = render();
    if (!prompt.ok()) return refuse(prompt.status());
    const int64_t room = m_.engine.max_model_len - static_cast<int64_t>(prompt->size());
    if (room < 1) {
      return refuse(invalid_argument("the conversation has ", prompt->size(),
                                     " tokens, the context is ", m_.engine.max_model_len,
                                     ": /reset or /undo"));
    }
    Request request;
    request.prompt = std::move(*prompt);
    request.sampling =
        args_.sampling.params(args_.max_tokens > 0 ? std::min(args_.max_tokens, room) : room);
    auto sink =
        std::make_shared<ChatSink>(m_.tokenizer, !args_.no_thinking, colour_, args_.sampling.stop);
    request.sink = sink;
    if (const Status valid = engine_.validate(request); !valid.ok()) return refuse(valid);
    K3_RETURN_IF_ERROR(run_request(&engine_, std::move(request)));
    std::fputc('\n', stdout);
    if (!sink->finish.error.ok()) return refuse(sink->finish.error);
    if (sink->finish.reason == FinishReason::kLength) std::fputs("[length limit]\n", stdout);
    if (!args_.model.quiet && terminal_) {
      const RequestStats& s = sink->finish.stats;
      std::fprintf(stderr, "%s[%lld tokens, first after %.0f ms]%s\n", colour_ ? "\033[2m" : "",
                   static_cast<long long>(s.completion_tokens), s.ttft_seconds * 1e3,
                   colour_ ? "\033[0m" : "");
    }
    Json answer = {{"role", "assistant"}, {"content", sink->content}};
    if (!sink->reasoning.empty()) answer["reasoning_content"] = sink->reasoning;
    messages_.push_back(std::move(answer));
    return {};
  }

  // False to leave.
  bool command(const std::string& line) {
    const size_t blank = line.find(' ');
    const std::string name = line.substr(0, blank);
    const std::string value = blank == std::string::npos ? "" : line.substr(blank + 1);
    const auto wrong = [&name](const char* expected) {
      std::fprintf(stderr, "k3: %s: expected %s\n", name.c_str(), expected);
    };
    if (name == "/exit" || name == "/quit") return false;
    if (name == "/help") {
      std::fputs(kHelp, stdout);
    } else if (name == "/reset") {
      reset();
    } else if (name == "/system") {
      args_.system = value;
      reset();
    } else if (name == "/think") {
      if (value == "on" || value == "off") {
        args_.no_thinking = value == "off";
      } else {
        wrong("on or off");
      }
    } else if (name == "/effort") {
      if (value == "low" || value == "high" || value == "max") {
        args_.effort = value;
      } else {
        wrong("low, high or max");
      }
    } else if (name == "/temperature") {
      char* end = nullptr;
      const float t = std::strtof(value.c_str(), &end);
      if (!value.empty() && *end == '\0' && t >= 0 && t <= 100) {
        args_.sampling.temperature = t;
      } else {
        wrong("a number from 0 to 100");
      }
    } else if (name == "/undo") {
      while (!messages_.empty() && messages_.back().at("role") != "system") {
        const bool user = messages_.back().at("role") == "user";
        messages_.erase(messages_.size() - 1);
        if (user) break;
      }
    } else if (name == "/save") {
      std::ofstream out(value);
      out << messages_.dump(2) << "\n";
      if (!out.flush()) wrong("a file that can be written");
    } else if (name == "/load") {
      load(value);
    } else if (name == "/tokens") {
      if (const auto ids = render(); ids.ok()) {
        std::printf("%zu of %lld\n", ids->size(), static_cast<long long>(m_.engine.max_model_len));
      } else {
        std::printf("0 of %lld\n", static_cast<long long>(m_.engine.max_model_len));
      }
    } else {
      wrong("a command of /help");
    }
    return true;
  }

  void load(const std::string& path) {
    const Result<std::string> text = read_input("/load", path);
    if (!text.ok()) {
      std::fprintf(stderr, "k3: %s\n", text.status().message().c_str());
      return;
    }
    Json loaded = py_json_loads(*text).value;
    const Json before = messages_;
    const bool array = loaded.is_array();
    if (array) messages_ = std::move(loaded);
    if (const auto ids = render(); !ids.ok() || !array) {
      messages_ = before;
      std::fprintf(stderr, "k3: /load %s: expected a JSON array of chat messages%s%s\n",
                   path.c_str(), ids.ok() ? "" : ": ",
                   ids.ok() ? "" : ids.status().message().c_str());
    }
  }

  ChatArgs args_;
  LoadedModel m_;
  Engine engine_;
  bool terminal_, colour_;
  std::string history_file_;
  Json messages_;
};

Status chat(const ChatArgs& args) {
  if (args.max_tokens < 0) {
    return invalid_argument("--max-tokens ", args.max_tokens, ": expected at least 0");
  }
  K3_RETURN_IF_ERROR(check_stop_strings(args.sampling.stop));
  if (args.effort != "low" && args.effort != "high" && args.effort != "max") {
    return invalid_argument("--reasoning-effort ", args.effort, ": expected low, high or max");
  }
  CapacityArgs capacity = args.capacity;
  if (capacity.max_num_seqs == 0) capacity.max_num_seqs = 1;
  K3_ASSIGN_OR_RETURN(LoadedModel model, load_model(args.model, capacity, true));
  if (model.tokenizer->markup().open < 0) {
    return checkpoint_error(args.model.model, ": the vocabulary has no <|open|> token, so no chat");
  }
  return Session(args, std::move(model)).run();
}

}  // namespace

void add_chat(CLI::App* app, int* exit_code) {
  auto args = std::make_shared<ChatArgs>();
  args->sampling.temperature = 0;
  app->footer(kHelp);
  add_model_flags(app, &args->model, true);
  add_flag_with_value(app, "--system", args->system, "System message");
  add_switch(app, "--no-thinking", args->no_thinking, "Answer without thinking first");
  add_flag_with_value(app, "--reasoning-effort", args->effort, "low, high or max");
  add_flag_with_value(app, "--max-tokens,-n", args->max_tokens,
                      "Tokens of one answer at most (0: what the context leaves)");
  add_sampling_flags(app, &args->sampling);
  add_capacity_flags(app, &args->capacity);
  app->callback([args, exit_code] { *exit_code = report(chat(*args)); });
}

}  // namespace k3::cli
