#include <algorithm>

#include "text/output_parser.h"

namespace k3 {

StopMatcher::StopMatcher(std::vector<std::string> stops, bool include_stop_str_in_output)
    : include_(include_stop_str_in_output) {
  for (std::string& stop : stops) {
    Pattern pattern;
    pattern.text = std::move(stop);
    const std::string& p = pattern.text;
    pattern.border.assign(p.size(), 0);
    for (size_t i = 1, k = 0; i < p.size(); ++i) {
      while (k > 0 && p[i] != p[k]) k = pattern.border[k - 1];
      if (p[i] == p[k]) ++k;
      pattern.border[i] = k;
    }
    patterns_.push_back(std::move(pattern));
  }
}

std::string StopMatcher::push(std::string_view text) {
  if (matched_ >= 0) return {};
  for (size_t i = 0; i < text.size(); ++i) {
    size_t longest = 0;
    for (size_t n = 0; n < patterns_.size(); ++n) {
      Pattern& pattern = patterns_[n];
      const std::string& p = pattern.text;
      if (p.empty()) continue;
      size_t& k = pattern.state;
      while (k > 0 && text[i] != p[k]) k = pattern.border[k - 1];
      if (text[i] == p[k]) ++k;
      if (k == p.size()) {
        if (k > longest) {
          longest = k;
          matched_ = static_cast<int>(n);
        }
        k = pattern.border[k - 1];
      }
    }
    if (matched_ >= 0) {
      std::string out = std::move(held_);
      held_.clear();
      out.append(text.substr(0, i + 1));
      if (!include_) out.resize(out.size() - longest);
      return out;
    }
  }
  size_t hold = 0;
  for (const Pattern& pattern : patterns_) hold = std::max(hold, pattern.state);
  held_.append(text);
  std::string out = held_.substr(0, held_.size() - hold);
  held_.erase(0, held_.size() - hold);
  return out;
}

std::string StopMatcher::flush() {
  std::string out = std::move(held_);
  held_.clear();
  return out;
}

}  // namespace k3
