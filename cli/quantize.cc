// heddle quantize: a checkpoint's linear layers in 4 and 8 bits, as Hugging Face's tools load them.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string_view>

#include "checkpoint/folder.h"
#include "checkpoint/quantize_rules.h"
#include "choices.h"
#include "heddle/checkpoint.h"
#include "heddle/error.h"
#include "npy.h"
#include "output.h"
#include "problem.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

namespace fs = std::filesystem;

volatile std::sig_atomic_t interrupted = 0;

// A bar that is drawn over itself where a person watches, else a line for each layer; on standard error.
class Progress {
 public:
  Progress() : terminal_(isatty(STDERR_FILENO) == 1) {}

  void show(const lowbit::QuantizeProgress& at) {
    const bool end = at.tensor.empty();
    if (!terminal_) {
      if (!at.format.empty()) {
        std::cerr << '[' << at.layers_done + 1 << '/' << at.layers_total << "] " << at.tensor << ": " << at.format
                  << '\n';
      }
      return;
    }
    constexpr int kWidth = 32;
    const double done =
        at.bytes_total > 0 ? static_cast<double>(at.bytes_done) / static_cast<double>(at.bytes_total) : 1;
    std::string bar;
    for (int i = 0; i < kWidth; ++i) bar += i < static_cast<int>(done * kWidth + 0.5) ? "\u2588" : "\u2591";
    std::string name = at.tensor;
    if (name.size() > 40) name = "..." + name.substr(name.size() - 37);
    std::cerr << '\r' << bar << ' ' << fixed(100 * done, 0) << " %  " << bytes_text(static_cast<double>(at.bytes_done))
              << " of " << bytes_text(static_cast<double>(at.bytes_total)) << "  " << name << "\x1b[K"
              << (end ? "\n" : "") << std::flush;
    open_ = !end;
  }
  ~Progress() {
    if (open_) std::cerr << '\n';
  }

 private:
  bool terminal_, open_ = false;
};

// "a/model.safetensors" or "a/model/" -> "a/model"
std::string stem_of(const std::string& input) {
  fs::path path(input);
  while (path.has_relative_path() && !path.has_filename()) path = path.parent_path();
  if (path.extension() == ".safetensors") path.replace_extension();
  return path.string();
}

// What transformers' from_pretrained needs to know of the folder, or cannot do with it: docs/quantize.md, "What others
// read".
std::vector<std::string> loading_limits(const lowbit::QuantizeReport& report) {
  std::string zero_points, floats;
  for (const lowbit::LayerReport& r : report.layers) {
    if (r.format.ends_with("_zp")) zero_points = r.format;
    if (r.format == "nvfp4" || r.format == "mxfp4") floats = r.format;
  }
  std::vector<std::string> limits;
  if (!zero_points.empty()) {
    limits.push_back(zero_points +
                     ": from_pretrained refuses its zero points (\"size mismatch\"); compressed-tensors' "
                     "decoder of a layer and heddle.lowbit.load read them");
  }
  if (!floats.empty() && report.dtype != "bfloat16") {
    limits.push_back(floats + ": decoded to bfloat16 whatever the model is in, which is " +
                     (report.dtype.empty() ? "not said" : report.dtype) + ": load with dtype=torch.bfloat16");
  }
  return limits;
}

// The .npy files of a folder and of those in it, by their names less the ending. Layers are looked up here, so that no
// tensor's name leads to a file elsewhere.
std::map<std::string, std::string> npy_files(const std::string& folder) {
  std::error_code failure;
  if (!fs::is_directory(folder, failure)) throw Error("--importance is " + folder + ": there is no such folder");
  std::map<std::string, std::string> found;
  for (auto entry = fs::recursive_directory_iterator(folder, failure);
       !failure && entry != fs::recursive_directory_iterator(); entry.increment(failure)) {
    const fs::path& path = entry->path();
    if (path.extension() != ".npy" || fs::is_directory(path)) continue;
    found[path.lexically_relative(folder).replace_extension().string()] = path.string();
  }
  if (failure) throw RuntimeError("--importance is " + folder + ": it cannot be read: " + failure.message());
  return found;
}

// Importance of layers, read when it is asked for.
class Importance {
 public:
  // Throws Error where no file is named after a 2-D weight of the model.
  Importance(const std::string& folder, const std::string& input) : files_(npy_files(folder)) {
    std::string layer;
    for (const SafeTensors& file : lowbit::ModelFolder::open(input).files) {
      for (const auto& [name, entry] : file.entries()) {
        if (entry.shape.size() != 2 || !name.ends_with(kWeight)) continue;
        layer = name.substr(0, name.size() - kWeight.size());
        if (files_.contains(layer)) ++known_;
      }
    }
    const std::string given = "--importance is " + folder + ": ";
    if (files_.empty()) throw Error(given + "it holds no LAYER.npy");
    if (known_ > 0) return;
    throw Error(given + "none of its " + std::to_string(files_.size()) + " files is of a layer of " + input +
                "; there is '" + files_.begin()->first + ".npy', and the layers are such as '" + layer + "'");
  }

  TensorView of(const std::string& layer) {
    const auto found = files_.find(layer);
    if (found == files_.end()) return {};
    last_ = read_npy("quantize", found->second);
    return last_.view();
  }
  // "" where each file is of a layer.
  std::string unknown() const {
    if (known_ == files_.size()) return "";
    return std::to_string(files_.size() - known_) + " of the " + std::to_string(files_.size()) +
           " files of --importance are of no layer of this checkpoint";
  }

 private:
  static constexpr std::string_view kWeight = ".weight";
  std::map<std::string, std::string> files_;
  std::size_t known_ = 0;
  HostTensor last_;
};

// Throws Error for what is no format of a checkpoint.
void check_format(const std::string& name) { lowbit::choice_of(name, lowbit::ScaleRule::plain); }

std::vector<std::string> names_of_formats() {
  std::vector<std::string> names = lowbit::format_names();
  std::erase_if(names, [](const std::string& name) {
    try {
      check_format(name);
      return false;
    } catch (const Error&) {
      return true;
    }
  });
  return names;
}

struct QuantizeVerb {
  CommonFlags common;
  std::string input, output, importance;
  std::string format = "nvfp4", rule = "mse";
  std::vector<std::string> layers, keep;

  lowbit::QuantizeCheckpointOptions options() const {
    lowbit::QuantizeCheckpointOptions out;
    out.format = format;
    out.rule = lowbit::rule_named(rule);
    for (const std::string& pattern : keep) out.layers.push_back({pattern, "keep"});
    for (const std::string& text : layers) {
      const std::size_t equals = text.rfind('=');
      if (equals == std::string::npos) {
        throw Error("--layers is '" + text + "': write PATTERN=FORMAT, PATTERN=16bit or PATTERN=keep");
      }
      out.layers.push_back({text.substr(0, equals), text.substr(equals + 1)});
    }
    return out;
  }

  void run() const {
    common.apply();
    const std::string target = output.empty() ? stem_of(input) + "-" + format : output;
    lowbit::QuantizeCheckpointOptions what = options();
    std::optional<Importance> weights;
    if (!importance.empty()) {
      weights.emplace(importance, input);
      if (!weights->unknown().empty()) std::cerr << weights->unknown() << '\n';
      what.importance = [&](const std::string& layer) { return weights->of(layer); };
    }
    Progress progress;
    what.progress = [&](const lowbit::QuantizeProgress& at) {
      if (interrupted != 0) throw RuntimeError("interrupted; nothing is left written");
      progress.show(at);
    };
    // So that what is written so far is removed.
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) std::signal(signal, [](int) { interrupted = 1; });
    const lowbit::QuantizeReport report = lowbit::quantize_checkpoint(input, target, what);
    if (common.json) {
      print_json(report, target);
    } else {
      print(report, target);
    }
  }

  static void print(const lowbit::QuantizeReport& report, const std::string& target) {
    Table table({{"layer"},
                 {"format"},
                 {"shape", Align::right},
                 {"SQNR dB", Align::right},
                 {"mean error", Align::right},
                 {"max error", Align::right},
                 {"before", Align::right},
                 {"after", Align::right}});
    for (const lowbit::LayerReport& r : report.layers) {
      table.add({r.name, r.format + (r.rule.empty() ? "" : ":" + r.rule),
                 std::to_string(r.rows) + " x " + std::to_string(r.columns), fixed(r.error.sqnr, 2),
                 scientific(r.error.mean), scientific(r.error.max), bytes_text(static_cast<double>(r.bytes_before)),
                 bytes_text(static_cast<double>(r.bytes_after))});
    }
    table.print();
    print_copied(report);
    const auto before = static_cast<double>(report.bytes_before), after = static_cast<double>(report.bytes_after);
    std::cout << '\n'
              << report.layers.size() << " layers changed, " << report.kept.size() << " 2-D weights kept; all tensors "
              << bytes_text(before) << " -> " << bytes_text(after) << " (" << fixed(100 * after / before, 1)
              << " %)\nwritten to " << target << '\n';
    for (const std::string& limit : loading_limits(report)) std::cout << limit << '\n';
  }

  // Most of a mixture of experts, where its file has them in one tensor.
  static void print_copied(const lowbit::QuantizeReport& report) {
    if (report.copied_3d.empty()) return;
    std::cout << '\n';
    Table table({{"not quantised: 3-D tensor"}, {"shape", Align::right}, {"bytes", Align::right}});
    std::size_t bytes = 0;
    for (const lowbit::CopiedTensor& tensor : report.copied_3d) {
      std::string shape;
      for (const std::int64_t extent : tensor.shape) shape += (shape.empty() ? "" : " x ") + std::to_string(extent);
      table.add({tensor.name, shape, bytes_text(static_cast<double>(tensor.bytes))});
      bytes += tensor.bytes;
    }
    table.print();
    std::cout << '\n'
              << report.copied_3d.size() << " 3-D tensors are as they were, " << bytes_text(static_cast<double>(bytes))
              << ", " << fixed(100 * static_cast<double>(bytes) / static_cast<double>(report.bytes_after), 1)
              << " % of the result: only 2-D weights are quantised\n";
  }

  static void print_json(const lowbit::QuantizeReport& report, const std::string& target) {
    Json out = {{"output", target}, {"bytes_before", report.bytes_before}, {"bytes_after", report.bytes_after}};
    out["layers"] = Json::array();
    for (const lowbit::LayerReport& r : report.layers) {
      out["layers"].push_back({{"name", r.name},
                               {"file", r.file},
                               {"format", r.format},
                               {"rule", r.rule},
                               {"shape", {r.rows, r.columns}},
                               {"sqnr_db", std::isfinite(r.error.sqnr) ? Json(r.error.sqnr) : Json()},
                               {"mean_error", r.error.mean},
                               {"max_error", r.error.max},
                               {"max_at", {r.error.max_row, r.error.max_column}},
                               {"bytes_before", r.bytes_before},
                               {"bytes_after", r.bytes_after},
                               {"global_scale", r.global_scale > 0 ? Json(r.global_scale) : Json()}});
    }
    out["kept"] = report.kept;
    out["copied_3d"] = Json::array();
    for (const lowbit::CopiedTensor& tensor : report.copied_3d) {
      out["copied_3d"].push_back(
          {{"name", tensor.name}, {"file", tensor.file}, {"shape", tensor.shape}, {"bytes", tensor.bytes}});
    }
    out["files"] = report.files;
    out["loading_limits"] = loading_limits(report);
    out["quantization_config"] = Json::parse(report.quantization_config);
    std::cout << out.dump(2) << '\n';
  }

  static std::string scientific(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2e", value);
    return text;
  }
};

}  // namespace

void add_quantize(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("quantize", "Write a checkpoint with its linear layers in 4 or 8 bits");
  examples(*verb, {"heddle quantize Llama-3.2-1B",
                   "heddle quantize Llama-3.2-1B --format int4_g64 --layers '*.down_proj=int8_row' -o small",
                   "heddle quantize model.safetensors --format mxfp4 --rule even --keep '*embed*' --json"});
  const auto self = std::make_shared<QuantizeVerb>();
  self->common.add_to(*verb);
  verb->add_option("input", self->input, "A safetensors file, or a model's folder")->type_name(kFile)->required();
  verb->add_option("-o,--out", self->output, "The folder to make (default: input-format, beside it)")
      ->type_name(kFolder);
  one_of(verb->add_option("--format", self->format, "Of layers that no pattern names"), names_of_formats(),
         check_format)
      ->capture_default_str();
  add_rule_flag(*verb, self->rule);
  verb->add_option("--layers", self->layers,
                   "PATTERN=FORMAT, PATTERN=FORMAT:RULE, PATTERN=16bit or PATTERN=keep; the first that matches decides")
      ->allow_extra_args(false)
      ->take_all();
  verb->add_option("--keep", self->keep, "Patterns of layers that stay as they are, before those of --layers")
      ->allow_extra_args(false)
      ->take_all();
  verb->add_option("--importance", self->importance,
                   "Folder of LAYER.npy, float32 [K]: mean squares of the layer's inputs, which weigh its errors")
      ->type_name(kFolder);
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
