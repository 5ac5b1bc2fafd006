// heddle_server: a small decoder of random weights behind HTTP, on localhost. README.md has its routes.
#include <httplib.h>
#include <pthread.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "scheduler.h"

namespace {

using namespace std::chrono_literals;
using example::Event, example::Scheduler, nlohmann::json;

constexpr std::size_t kMostBytes = 64 * 1024;  // of a request's body
constexpr int kSpareThreads = 8;               // that answer what is refused, and ask for health and metrics

struct Settings {
  example::DecoderOptions decoder;
  int port = 8080;
  std::int64_t queue = 32;
  double grace = 5;
};

// What is wrong with a request, a sentence.
struct BadRequest : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// "tokens is -3: it must be ". Of what holds more, which may be nested to any depth, its kind.
std::string wrong(const std::string& name, const json& value) {
  constexpr std::size_t kMost = 40;  // bytes of it; all are ASCII
  std::string shown = value.is_structured() ? std::string("an ") + value.type_name() : value.dump(-1, ' ', true);
  if (shown.size() > kMost) shown = shown.substr(0, kMost) + "...";
  return name + " is " + shown + ": it must be ";
}

std::int64_t integer(const json& value, const char* name, std::int64_t least) {
  // Unsigned numbers above int64's would come out negative.
  const bool fits =
      value.is_number_integer() && (!value.is_number_unsigned() || value.get<std::uint64_t>() < 1ull << 63);
  if (!fits || value.get<std::int64_t>() < least) {
    throw BadRequest(wrong(name, value) + "an integer of at least " + std::to_string(least));
  }
  return value.get<std::int64_t>();
}

// A string, or bytes that need not be UTF-8.
std::string prompt_of(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) throw BadRequest(wrong("prompt", value) + "a string or an array of bytes");
  std::string bytes;
  for (const json& byte : value) {
    if (!byte.is_number_unsigned() || byte.get<std::uint64_t>() > 255) {
      throw BadRequest(wrong("prompt[" + std::to_string(bytes.size()) + "]", byte) + "an integer from 0 to 255");
    }
    bytes.push_back(static_cast<char>(byte.get<std::uint64_t>()));
  }
  return bytes;
}

example::Request parse(const std::string& body) {
  const json fields = json::parse(body, nullptr, false);
  if (!fields.is_object()) throw BadRequest("the body must be a JSON object in UTF-8");
  example::Request request;
  for (const auto& [name, value] : fields.items()) {
    if (name == "prompt") {
      request.prompt = prompt_of(value);
    } else if (name == "tokens") {
      request.tokens = integer(value, "tokens", 1);
    } else if (name == "seed") {
      request.seed = static_cast<std::uint64_t>(integer(value, "seed", 0));
    } else if (name == "temperature") {
      if (value.is_number()) request.temperature = value.get<double>();
      if (!value.is_number() || !(request.temperature >= 0 && request.temperature <= 100)) {
        throw BadRequest(wrong("temperature", value) + "a number from 0 to 100");
      }
    } else {
      throw BadRequest("there is no field '" + name + "': there are prompt, tokens, temperature and seed");
    }
  }
  if (request.prompt.empty()) throw BadRequest("prompt is missing or empty: it must have at least one byte");
  if (request.tokens == 0) throw BadRequest("tokens is missing: it says how many to make, at least 1");
  return request;
}

void answer(httplib::Response& response, int status, const json& body) {
  response.status = status;
  response.set_content(body.dump() + "\n", "application/json");
}

std::string text_of(const example::Metrics& m) {
  std::string text;
  const auto line = [&](const char* name, const char* kind, const json& value) {
    text += std::string("# TYPE heddle_server_") + name + " " + kind + "\nheddle_server_" + name + " " + value.dump() +
            "\n";
  };
  line("queue_length", "gauge", m.queued);
  line("active_sequences", "gauge", m.active);
  line("pages_free", "gauge", m.pages_free);
  line("pages", "gauge", m.pages);
  line("tokens_per_second", "gauge", m.tokens_per_second);
  line("tokens_total", "counter", m.tokens);
  line("requests_finished_total", "counter", m.finished);
  line("requests_cancelled_total", "counter", m.cancelled);
  line("requests_stopped_total", "counter", m.stopped);
  line("requests_refused_total", "counter", m.refused);
  return text;
}

void generate(Scheduler& scheduler, std::atomic<int>& open, const httplib::Request& asked,
              httplib::Response& response) {
  example::Request request;
  try {
    request = parse(asked.body);
    if (const std::string refusal = scheduler.refusal(request); !refusal.empty()) throw BadRequest(refusal);
  } catch (const BadRequest& error) {
    return answer(response, 400, {{"error", error.what()}});
  }
  const auto stream = scheduler.submit(std::move(request));
  if (!stream) {
    response.set_header("Retry-After", "1");
    return answer(response, 503,
                  {{"error", scheduler.stopping() ? "the server is stopping" : "the queue is full: try again later"}});
  }
  ++open;
  const auto next = [stream, made = 0](std::size_t, httplib::DataSink& sink) mutable {
    const auto event = stream->next(100ms);
    if (!event) return sink.is_writable();  // nothing yet: is the reader still there?
    json data;
    if (event->kind == Event::Kind::token) {
      ++made;
      data = {{"token", event->token}, {"logprob", event->logprob}};
    } else {
      data = {{"end", event->kind == Event::Kind::finished ? "length" : "stopped"}, {"tokens", made}};
    }
    const std::string text = "data: " + data.dump() + "\n\n";
    if (!sink.write(text.data(), text.size())) return false;
    if (event->kind != Event::Kind::token) sink.done();
    return true;
  };
  // Called in any case, when the response has gone out or failed.
  const auto release = [stream, &open](bool) {
    stream->cancel();
    --open;
  };
  response.set_chunked_content_provider("text/event-stream", next, release);
}

int serve(const Settings& settings) {
  // Signals go to sigwait() below, and to no other thread: not to those that the libraries start, which inherit this.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  example::Decoder decoder(settings.decoder);
  Scheduler scheduler(decoder, settings.queue);
  std::atomic<int> open = 0;  // responses that stream

  httplib::Server server;
  // A thread for each request that streams or waits: what is refused, and /health, never wait behind them.
  const auto threads = static_cast<std::size_t>(settings.decoder.sequences + settings.queue + kSpareThreads);
  server.new_task_queue = [threads] { return new httplib::ThreadPool(threads); };
  server.set_payload_max_length(kMostBytes);
  server.set_keep_alive_max_count(1);  // an idle connection would hold a thread
  server.set_read_timeout(2s);
  server.set_write_timeout(2s);
  server.set_tcp_nodelay(true);
  // The library's own options have SO_REUSEPORT, with which two servers would share a port without a word.
  server.set_socket_options([](socket_t socket) {
    const int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  });
  server.Post("/generate", [&](const auto& request, auto& response) { generate(scheduler, open, request, response); });
  server.Get("/health", [&](const auto&, auto& response) {
    const bool stopping = scheduler.stopping();
    answer(response, stopping ? 503 : 200, {{"status", stopping ? "stopping" : "ok"}});
  });
  server.Get("/metrics", [&](const auto&, auto& response) {
    response.set_content(text_of(scheduler.metrics()), "text/plain; version=0.0.4");
  });

  // Of what no handler above has answered, or never saw.
  server.set_error_handler([](const httplib::Request&, httplib::Response& response) {
    if (!response.body.empty()) return;
    answer(
        response, response.status,
        {{"error", response.status == 404   ? "there are POST /generate, GET /health and GET /metrics, and nothing else"
                   : response.status == 413 ? "the body must have at most " + std::to_string(kMostBytes) + " bytes"
                                            : "the request cannot be served as it is"}});
  });

  const int port = settings.port == 0 ? server.bind_to_any_port("127.0.0.1")
                                      : (server.bind_to_port("127.0.0.1", settings.port) ? settings.port : -1);
  if (port < 0) throw std::runtime_error("port " + std::to_string(settings.port) + " of 127.0.0.1 cannot be had");
  std::thread listener([&] { server.listen_after_bind(); });
  std::printf("listening on http://127.0.0.1:%d\n", port);
  std::fflush(stdout);

  int signal = 0;
  sigwait(&signals, &signal);
  scheduler.stop(std::chrono::milliseconds(static_cast<std::int64_t>(1000 * settings.grace)));
  // stop() cuts what is being written.
  for (int i = 0; i < 200 && open > 0; ++i) std::this_thread::sleep_for(10ms);
  server.stop();
  listener.join();
  const auto m = scheduler.metrics();
  std::printf("stopped: %lld requests finished, %lld cancelled, %lld cut short; %lld of %lld pages are free\n",
              static_cast<long long>(m.finished), static_cast<long long>(m.cancelled),
              static_cast<long long>(m.stopped), static_cast<long long>(m.pages_free), static_cast<long long>(m.pages));
  return m.pages_free == m.pages ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("A decoder of random weights behind HTTP, with continuous batching over a paged cache.");
  app.add_option("--port", settings.port, "of 127.0.0.1; 0: any")->check(CLI::Range(0, 65535))->capture_default_str();
  app.add_option("--format", settings.decoder.format, "of the weights, a name of heddle/lowbit.h")
      ->capture_default_str();
  app.add_option("--seed", settings.decoder.seed, "of the weights")->capture_default_str();
  const auto positive = CLI::Range(std::int64_t{1}, std::int64_t{1} << 20);
  app.add_option("--layers", settings.decoder.layers)->check(positive)->capture_default_str();
  app.add_option("--context", settings.decoder.context, "keys that a sequence may have")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--pages", settings.decoder.pages, "of 16 keys, for all sequences")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--sequences", settings.decoder.sequences, "in one step")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--queue", settings.queue, "requests that may wait")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--grace", settings.grace, "seconds to finish in, after SIGTERM")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    return serve(settings);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "heddle_server: %s\n", error.what());
    return 1;
  }
}
