#include "scheduler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace example {
namespace {

// The n-th number of a seed, uniform in [0, 1): Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators", 2014. It depends on nothing else that runs.
double uniform(std::uint64_t seed, std::int64_t n) {
  std::uint64_t z = seed + 0x9e3779b97f4a7c15 * (static_cast<std::uint64_t>(n) + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

double log_sum_exp(std::span<const float> logits, double temperature) {
  const double largest = std::ranges::max(logits) / temperature;
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit / temperature - largest);
  return largest + std::log(sum);
}

int choose(std::span<const float> logits, const Request& request, std::int64_t n) {
  const auto likeliest = static_cast<int>(std::ranges::max_element(logits) - logits.begin());
  if (request.temperature == 0) return likeliest;
  const double total = log_sum_exp(logits, request.temperature);
  double left = uniform(request.seed, n);
  for (std::size_t token = 0; token < logits.size(); ++token) {
    left -= std::exp(logits[token] / request.temperature - total);
    if (left < 0) return static_cast<int>(token);
  }
  return likeliest;  // the probabilities' sum was rounded to a little less than 1
}

}  // namespace

std::optional<Event> Stream::next(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, patience, [&] { return !events_.empty(); })) return std::nullopt;
  const Event event = events_.front();
  events_.pop_front();
  return event;
}

void Stream::push(const Event& event) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
  }
  changed_.notify_one();
}

Scheduler::Scheduler(Decoder& decoder, std::int64_t queue) : decoder_(decoder), queue_limit_(queue) {
  free_pages_.resize(static_cast<std::size_t>(decoder.options().pages));
  std::iota(free_pages_.rbegin(), free_pages_.rend(), 0);
  thread_ = std::thread([this] { loop(); });
}

// The last token is not appended.
std::int64_t Scheduler::pages_for(const Request& request) const {
  return (static_cast<std::int64_t>(request.prompt.size()) + request.tokens - 1 + kPageSize - 1) / kPageSize;
}

std::string Scheduler::refusal(const Request& request) const {
  const auto& o = decoder_.options();
  const auto prompt = static_cast<std::int64_t>(request.prompt.size());
  if (prompt > o.context || request.tokens > o.context - prompt) {
    return "prompt has " + std::to_string(prompt) + " bytes and tokens is " + std::to_string(request.tokens) +
           ": together they must be at most the context, " + std::to_string(o.context);
  }
  if (pages_for(request) > o.pages) {
    return "prompt has " + std::to_string(prompt) + " bytes and tokens is " + std::to_string(request.tokens) +
           ": together they must fit in the cache, " + std::to_string(o.pages * kPageSize) + " keys";
  }
  return {};
}

std::shared_ptr<Stream> Scheduler::submit(Request request) {
  auto job = std::make_unique<Job>();
  job->request = std::move(request);
  job->stream = std::make_shared<Stream>();
  const auto stream = job->stream;
  {
    const std::lock_guard lock(mutex_);
    if (deadline_ || static_cast<std::int64_t>(queue_.size()) >= queue_limit_) {
      ++metrics_.refused;
      return nullptr;
    }
    queue_.push_back(std::move(job));
  }
  arrived_.notify_one();
  return stream;
}

void Scheduler::stop(std::chrono::milliseconds grace) {
  {
    const std::lock_guard lock(mutex_);
    if (!deadline_) deadline_ = Clock::now() + grace;
  }
  arrived_.notify_one();
  if (thread_.joinable()) thread_.join();
}

bool Scheduler::stopping() const {
  const std::lock_guard lock(mutex_);
  return deadline_.has_value();
}

Metrics Scheduler::metrics() const {
  const std::lock_guard lock(mutex_);
  Metrics found = metrics_;
  found.queued = static_cast<std::int64_t>(queue_.size());
  found.pages = decoder_.options().pages;
  found.pages_free = static_cast<std::int64_t>(free_pages_.size());
  const auto since = Clock::now() - std::chrono::duration<double>(kRateSeconds);
  const auto made = std::ranges::count_if(recent_, [&](const auto& when) { return when > since; });
  found.tokens_per_second = static_cast<double>(made) / kRateSeconds;
  return found;
}

void Scheduler::loop() {
  while (take_jobs()) {
    // A long prompt goes in by pieces between the steps of others, always cut at the same places: its bits do not
    // depend on them. Who decodes is settled before, so that a prompt's first token is not fed in the same step.
    std::vector<Job*> decoding;
    Job* waiting = nullptr;
    for (const auto& job : active_) {
      const bool complete = job->prefilled == static_cast<std::int64_t>(job->request.prompt.size());
      if (complete) decoding.push_back(job.get());
      if (!complete && !waiting) waiting = job.get();
    }
    if (!decoding.empty()) decode(decoding);
    if (waiting) prefill(*waiting);
    retire();
  }
}

// Waits until there is something to do, takes what fits in; false: stopped. A request gets all the pages that it will
// need, so that none comes to a halt half way; the first in the queue is not overtaken by those that need fewer.
bool Scheduler::take_jobs() {
  std::unique_lock lock(mutex_);
  arrived_.wait(lock, [&] { return deadline_ || !queue_.empty() || !active_.empty(); });
  if (deadline_ && Clock::now() >= *deadline_) {
    std::ranges::move(queue_, std::back_inserter(active_));
    queue_.clear();
    for (const auto& job : active_) {
      job->stream->push({.kind = Event::Kind::stopped});
      release(*job);
      ++metrics_.stopped;
    }
    active_.clear();
  }
  std::erase_if(queue_, [&](const auto& job) {
    metrics_.cancelled += job->stream->cancelled_;
    return job->stream->cancelled_.load();
  });
  while (!queue_.empty() && static_cast<std::int64_t>(active_.size()) < decoder_.options().sequences) {
    const auto pages = pages_for(queue_.front()->request);
    if (pages > static_cast<std::int64_t>(free_pages_.size())) break;
    active_.push_back(std::move(queue_.front()));
    queue_.pop_front();
    active_.back()->place.pages.assign(free_pages_.end() - pages, free_pages_.end());
    free_pages_.resize(free_pages_.size() - static_cast<std::size_t>(pages));
  }
  metrics_.active = static_cast<std::int64_t>(active_.size());
  return !deadline_ || !active_.empty();
}

void Scheduler::prefill(Job& job) {
  const auto bytes = std::as_bytes(std::span(job.request.prompt)).subspan(static_cast<std::size_t>(job.prefilled));
  const auto count = std::min<std::size_t>(bytes.size(), kPrefillRows);
  const auto* tokens = reinterpret_cast<const std::uint8_t*>(bytes.data());
  CachedSequence* const place = &job.place;
  const auto logits = decoder_.forward({tokens, count}, {&place, 1});
  job.prefilled += static_cast<std::int64_t>(count);
  if (count == bytes.size()) emit(job, logits);
}

void Scheduler::decode(const std::vector<Job*>& jobs) {
  std::vector<std::uint8_t> tokens;
  std::vector<CachedSequence*> places;
  for (Job* job : jobs) {
    tokens.push_back(job->last);
    places.push_back(&job->place);
  }
  const auto logits = decoder_.forward(tokens, places);
  for (std::size_t i = 0; i < jobs.size(); ++i) emit(*jobs[i], logits.subspan(i * kVocabulary, kVocabulary));
}

void Scheduler::emit(Job& job, std::span<const float> logits) {
  const int token = choose(logits, job.request, job.made);
  job.last = static_cast<std::uint8_t>(token);
  ++job.made;
  const auto logprob = static_cast<float>(logits[static_cast<std::size_t>(token)] - log_sum_exp(logits, 1));
  job.stream->push({.token = token, .logprob = logprob});
  const std::lock_guard lock(mutex_);
  ++metrics_.tokens;
  const auto now = Clock::now();
  while (!recent_.empty() && now - recent_.front() > std::chrono::duration<double>(kRateSeconds)) {
    recent_.pop_front();
  }
  recent_.push_back(now);
}

// Pages come back before the reader hears of the end.
void Scheduler::retire() {
  const std::lock_guard lock(mutex_);
  std::erase_if(active_, [&](const auto& job) {
    const bool cancelled = job->stream->cancelled_;
    if (!job->done() && !cancelled) return false;
    release(*job);
    ++(job->done() ? metrics_.finished : metrics_.cancelled);
    if (job->done()) job->stream->push({.kind = Event::Kind::finished});
    return true;
  });
  metrics_.active = static_cast<std::int64_t>(active_.size());
}

void Scheduler::release(Job& job) {
  free_pages_.insert(free_pages_.end(), job.place.pages.begin(), job.place.pages.end());
  job.place.pages.clear();
}

}  // namespace example
