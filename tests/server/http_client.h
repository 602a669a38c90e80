// A small HTTP/1.1 client on a plain socket, for tests that must be rude: half requests, sudden
// closes, not reading. Blocking, with a receive timeout of 10 seconds.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace k3::testing {

struct ClientReply {
  int status = 0;
  std::map<std::string, std::string> headers;  // lower case
  std::string body;                            // chunks joined
  bool complete = false;                       // as its framing says
  nlohmann::json json() const { return nlohmann::json::parse(body, nullptr, false); }
};

class HttpClient {
 public:
  explicit HttpClient(uint16_t port, int receive_buffer = 0) {
    fd_ = socket(AF_INET, SOCK_STREAM, 0);
    if (receive_buffer > 0) {
      setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    }
    timeval timeout{10, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }
  ~HttpClient() { close(); }
  HttpClient(HttpClient&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)),
        connected_(other.connected_),
        buffer_(std::move(other.buffer_)) {}

  bool connected() const { return connected_; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  bool send_raw(std::string_view data) {
    while (!data.empty()) {
      const ssize_t n = ::send(fd_, data.data(), data.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      data.remove_prefix(static_cast<size_t>(n));
    }
    return true;
  }

  bool send_request(const std::string& method, const std::string& path,
                    const std::string& body = "", const std::string& headers = "") {
    std::string out = method + " " + path + " HTTP/1.1\r\nHost: test\r\n" + headers;
    if (!body.empty() || method == "POST") {
      out += "Content-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
             "\r\n";
    }
    return send_raw(out + "\r\n" + body);
  }

  // One more read into the buffer; false at the end or after the timeout.
  bool receive() {
    char data[16384];
    const ssize_t n = recv(fd_, data, sizeof data, 0);
    if (n <= 0) return false;
    buffer_.append(data, static_cast<size_t>(n));
    return true;
  }
  const std::string& buffered() const { return buffer_; }

  ClientReply read_reply(bool head = false) {
    ClientReply reply;
    size_t end = 0;
    while ((end = buffer_.find("\r\n\r\n")) == std::string::npos) {
      if (!receive()) return reply;
    }
    size_t line = buffer_.find("\r\n");
    reply.status = std::atoi(buffer_.c_str() + 9);
    while (line < end) {
      const size_t start = line + 2;
      line = buffer_.find("\r\n", start);
      const size_t colon = buffer_.find(": ", start);
      std::string name = buffer_.substr(start, colon - start);
      for (char& c : name) c = static_cast<char>(std::tolower(c));
      reply.headers[name] = buffer_.substr(colon + 2, line - colon - 2);
    }
    buffer_.erase(0, end + 4);
    if (reply.status == 100) return read_reply(head);
    if (head) {
      reply.complete = true;
      return reply;
    }
    if (reply.headers.count("transfer-encoding") != 0) {
      for (;;) {
        while ((end = buffer_.find("\r\n")) == std::string::npos) {
          if (!receive()) return reply;
        }
        const size_t size = std::stoul(buffer_, nullptr, 16);
        while (buffer_.size() < end + 2 + size + 2) {
          if (!receive()) return reply;
        }
        reply.body += buffer_.substr(end + 2, size);
        buffer_.erase(0, end + 2 + size + 2);
        if (size == 0) break;
      }
      reply.complete = true;
      return reply;
    }
    const auto length = reply.headers.find("content-length");
    if (length == reply.headers.end()) {
      while (receive()) {
      }
      reply.body = std::exchange(buffer_, "");
      reply.complete = true;
      return reply;
    }
    const size_t size = std::stoul(length->second);
    while (buffer_.size() < size) {
      if (!receive()) return reply;
    }
    reply.body = buffer_.substr(0, size);
    buffer_.erase(0, size);
    reply.complete = true;
    return reply;
  }

  ClientReply request(const std::string& method, const std::string& path,
                      const std::string& body = "", const std::string& headers = "") {
    if (!send_request(method, path, body, headers)) return {};
    return read_reply(method == "HEAD");
  }

 private:
  int fd_ = -1;
  bool connected_ = false;
  std::string buffer_;
};

// The `data:` payloads of a stream, in order; fails the framing by returning "BAD FRAME" entries.
inline std::vector<std::string> sse_payloads(const std::string& body) {
  std::vector<std::string> out;
  size_t at = 0;
  while (at < body.size()) {
    const size_t end = body.find("\n\n", at);
    if (end == std::string::npos || body.compare(at, 6, "data: ") != 0) {
      out.push_back("BAD FRAME");
      break;
    }
    out.push_back(body.substr(at + 6, end - at - 6));
    at = end + 2;
  }
  return out;
}

}  // namespace k3::testing
