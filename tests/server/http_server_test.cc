// HTTP itself, with a handler that knows no model.
#include "server/http_server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "http_client.h"

namespace k3 {
namespace {

using testing::ClientReply;
using testing::HttpClient;
using namespace std::chrono_literals;

struct Echo {
  explicit Echo(HttpOptions options = {}) {
    options.port = 0;
    server = std::make_unique<HttpServer>(
        options,
        [this](HttpRequest request, std::shared_ptr<Responder> responder) {
          ++requests;
          if (request.path == "/drop") return;
          if (request.path == "/stream") {
            responder->begin({});
            responder->write("one,");
            responder->write("two");
            responder->end();
            return;
          }
          HttpReply reply;
          reply.content_type = "text/plain";
          reply.body = request.method + " " + request.path + " " + request.body;
          if (request.path == "/big") reply.body.assign(8 << 20, 'x');
          responder->send(std::move(reply));
        },
        [](int status, const std::string& message) {
          HttpReply reply;
          reply.status = status;
          reply.body = message;
          return reply;
        });
    const Status status = server->start();
    EXPECT_TRUE(status.ok()) << status.message();
  }
  std::atomic<int> requests{0};
  std::unique_ptr<HttpServer> server;
};

TEST(Http, KeepAliveAndPipelinedRequestsAreAnsweredInOrder) {
  Echo echo;
  HttpClient client(echo.server->port());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(client.request("GET", "/a").body, "GET /a ");
  std::string many;
  for (int i = 0; i < 50; ++i) {
    many += "POST /" + std::to_string(i) + " HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc";
  }
  client.send_raw(many);
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(client.read_reply().body, "POST /" + std::to_string(i) + " abc");
  }
  // Two that arrive while an answer is being written.
  client.send_raw("GET /big HTTP/1.1\r\nHost: x\r\n\r\n");
  std::this_thread::sleep_for(50ms);
  client.send_raw("GET /b HTTP/1.1\r\nHost: x\r\n\r\n");
  std::this_thread::sleep_for(50ms);
  client.send_raw("GET /c HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(client.read_reply().body.size(), size_t{8} << 20);
  EXPECT_EQ(client.read_reply().body, "GET /b ");
  EXPECT_EQ(client.read_reply().body, "GET /c ");
}

TEST(Http, StreamsAreChunkedForHttp11AndEndByClosingForHttp10) {
  Echo echo;
  HttpClient client(echo.server->port());
  EXPECT_EQ(client.request("GET", "/stream").body, "one,two");
  HttpClient old(echo.server->port());
  old.send_raw("GET /stream HTTP/1.0\r\n\r\n");
  const ClientReply reply = old.read_reply();
  EXPECT_EQ(reply.body, "one,two");
  EXPECT_EQ(reply.headers.count("transfer-encoding"), 0u);
}

TEST(Http, MalformedRequestsAre400AndTheConnectionCloses) {
  Echo echo;
  for (const char* text :
       {"hello\r\n\r\n", "GET\r\n\r\n", "GET / HTTP/9.9\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01garbage\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\nA\x01: b\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5x\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: "
        "chunked\r\n\r\n0\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
        // A coding we do not read: what follows is its body, never a second request.
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\nGET /a HTTP/1.1\r\nHost: "
        "x\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity\r\n\r\nGET /a HTTP/1.1\r\nHost: "
        "x\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, gzip\r\n\r\nGET /a "
        "HTTP/1.1\r\nHost: x\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: "
        "gzip\r\n\r\n0\r\n"
        "\r\n"}) {
    HttpClient client(echo.server->port());
    client.send_raw(text);
    EXPECT_EQ(client.read_reply().status, 400) << text;
    EXPECT_FALSE(client.receive()) << text;
  }
  EXPECT_EQ(echo.requests, 0);
  HttpClient good(echo.server->port());
  EXPECT_EQ(good.request("GET", "/a").status, 200);
}

TEST(Http, ATargetMayNameItsHost) {
  Echo echo;
  HttpClient client(echo.server->port());
  EXPECT_EQ(client.request("GET", "http://proxy.example/a?b=c").body, "GET /a ");
  EXPECT_EQ(client.request("GET", "http://proxy.example").body, "GET / ");
}

TEST(Http, HeadersAndBodiesHaveLimits) {
  HttpOptions options;
  options.max_header_bytes = 4096;
  options.max_body_bytes = 10000;
  Echo echo(options);
  HttpClient header(echo.server->port());
  header.send_request("GET", "/a", "", "X: " + std::string(5000, 'x') + "\r\n");
  EXPECT_EQ(header.read_reply().status, 431);
  HttpClient body(echo.server->port());
  body.send_request("POST", "/a", std::string(20000, 'x'));
  EXPECT_EQ(body.read_reply().status, 413);
  HttpClient chunked(echo.server->port());
  chunked.send_raw("POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n");
  for (int i = 0; i < 20; ++i) chunked.send_raw("3e8\r\n" + std::string(1000, 'x') + "\r\n");
  EXPECT_EQ(chunked.read_reply().status, 413);
  HttpClient fits(echo.server->port());
  EXPECT_EQ(fits.request("POST", "/a", std::string(10000, 'x')).status, 200);
  EXPECT_EQ(echo.requests, 1);
}

TEST(Http, ExpectContinueIsAnswered) {
  Echo echo;
  HttpClient client(echo.server->port());
  client.send_raw(
      "POST /a HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
  ASSERT_TRUE(client.receive());
  EXPECT_EQ(client.buffered(), "HTTP/1.1 100 Continue\r\n\r\n");
  client.send_raw("hi");
  EXPECT_EQ(client.read_reply().body, "POST /a hi");
}

TEST(Http, SlowHeadersBodiesAndReadersRunOutOfTime) {
  HttpOptions options;
  options.header_seconds = 0.3;
  options.body_seconds = 0.3;
  options.write_seconds = 0.3;
  options.idle_seconds = 0.6;
  Echo echo(options);
  HttpClient header(echo.server->port()), body(echo.server->port()), idle(echo.server->port());
  body.send_raw("POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc");
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 8; ++i) {  // a byte now and then must not help
    header.send_raw(i == 0 ? "GET /a HTTP/1.1\r\nHost: x\r\nX: " : "x");
    std::this_thread::sleep_for(50ms);
  }
  EXPECT_EQ(header.read_reply().status, 408);
  EXPECT_EQ(body.read_reply().status, 408);
  EXPECT_FALSE(idle.receive());
  EXPECT_LT(std::chrono::steady_clock::now() - start, 3s);
  HttpClient reader(echo.server->port(), 2048);
  reader.send_request("GET", "/big");
  for (int i = 0; i < 500 && echo.server->connections() > 0; ++i) {
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_EQ(echo.server->connections(), 0) << "a client that takes nothing is let go";
}

TEST(Http, AHandlerThatForgetsIsAnsweredFor) {
  Echo echo;
  HttpClient client(echo.server->port());
  EXPECT_EQ(client.request("GET", "/drop").status, 500);
  EXPECT_EQ(client.request("GET", "/a").status, 200);
}

TEST(Http, TwoThousandIdleConnectionsLeaveRoomForWork) {
  Echo echo;
  std::vector<HttpClient> idle;
  for (int i = 0; i < 2000; ++i) {
    idle.emplace_back(echo.server->port());
    ASSERT_TRUE(idle.back().connected()) << i;
  }
  HttpClient client(echo.server->port());
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(client.request("GET", "/a").status, 200);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 2s);
  EXPECT_EQ(idle[1999].request("GET", "/z").body, "GET /z ");
  EXPECT_GE(echo.server->connections(), 2000);
}

TEST(Http, APortInUseIsAnError) {
  Echo echo;
  HttpOptions options;
  options.port = echo.server->port();
  HttpServer second(options, nullptr, nullptr);
  const Status status = second.start();
  EXPECT_EQ(status.code(), ErrorCode::kUnavailable);
  EXPECT_NE(status.message().find(std::to_string(options.port)), std::string::npos);
  HttpOptions nowhere;
  nowhere.host = "256.1.1.1";
  EXPECT_EQ(HttpServer(nowhere, nullptr, nullptr).start().code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace k3
