// What a chat request must look like to be rendered; shared by parse_chat_request and the renderer.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/status.h"
#include "text/chat.h"

namespace k3 {

// The member `key` of an object; nullptr where it is missing or null.
const nlohmann::ordered_json* find_member(const nlohmann::ordered_json& object,
                                          std::string_view key);

// A value as an error message shows it: a string (cut if long), a type's name, or "missing".
std::string describe(const nlohmann::ordered_json* value);

// A system message that declares tools (a non-empty `tools` array).
bool declares_tools(const nlohmann::ordered_json& message);

// kInvalidArgument names the field that K3's prompt format (or the API it is served with) does not
// allow. After this the renderer may take shapes for granted; it still has to resolve tool results.
Status check_chat_request(const ChatRequest& request);

}  // namespace k3
