// heddle run: attention over tensors in files.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <list>
#include <memory>
#include <optional>

#include "choices.h"
#include "core/files.h"
#include "gpu.h"
#include "heddle/error.h"
#include "heddle/safetensors.h"
#include "npy.h"
#include "output.h"
#include "problem.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

struct Input {
  const char* name;  // in a safetensors file; the flag is --name with dashes
  const char* help;
  TensorView AttentionOptions::*option;  // null for q, k and v
};

constexpr Input kInputs[] = {
    {"q", "Queries [B, Sq, H, D], packed [total, H, D]", nullptr},
    {"k", "Keys [B, Sk, Hkv, D], packed [total, Hkv, D], paged [pages, page_size, Hkv, D]", nullptr},
    {"v", "Values, as k with Dv", nullptr},
    {"bias", "Additive bias [B|1, H|1, Sq|1, Sk|1]", &AttentionOptions::bias},
    {"mask", "Boolean mask, true = attend, [B|1, H|1, Sq|1, Sk|1]", &AttentionOptions::mask},
    {"sink", "One logit a head, f32 [H]", &AttentionOptions::sink},
    {"alibi_slopes", "f32 [H] or [B, H]", &AttentionOptions::alibi_slopes},
    {"cu_seqlens_q", "int32 [B + 1]: q is packed", &AttentionOptions::cu_seqlens_q},
    {"cu_seqlens_k", "int32 [B + 1]: k and v are packed", &AttentionOptions::cu_seqlens_k},
    {"seqused_q", "int32 [B]: rows in use", &AttentionOptions::seqused_q},
    {"seqused_k", "int32 [B]: keys in use", &AttentionOptions::seqused_k},
    {"page_table", "int32 [B, max_pages]: k and v are paged", &AttentionOptions::page_table},
    {"cache_batch_idx", "int32 [B]: row of k and v that each sequence reads", &AttentionOptions::cache_batch_idx},
    {"cache_leftpad", "int32 [B]: slots to skip", &AttentionOptions::cache_leftpad},
};

std::string flag_of(const char* name) {
  std::string flag = std::string("--") + name;
  for (std::size_t i = 2; i < flag.size(); ++i) flag[i] = flag[i] == '_' ? '-' : flag[i];
  return flag;
}

class Run {
 public:
  void add_to(CLI::App& app) {
    common_.add_to(app);
    app.add_option("--tensors", tensors_file_,
                   "safetensors file with tensors named q, k, v, bias, ... as the flags below")
        ->type_name(kFile);
    for (std::size_t i = 0; i < std::size(kInputs); ++i) {
      app.add_option(flag_of(kInputs[i].name), files_[i], std::string(kInputs[i].help) + "; .npy file")
          ->type_name(kFile)
          ->group("Tensors");
    }
    add_dtype_flag(app, dtype_, "Convert q, k and v first (default: as they are)");
    app.add_option("-o,--out", out_, "Where o goes, .npy (bf16 is written as f32)")->type_name(kFile)->required();
    app.add_option("--lse", lse_, "Where the log-sum-exp goes, .npy f32")->type_name(kFile);
    options_.add_to(app);
    add_device_flag(app, device_);
  }

  void run() {
    common_.apply();
    require_device("run", device_);
    keep_inputs();
    if (device_ == "cuda") gpu_.emplace("run");
    AttentionOptions options;
    options_.fill(options);
    std::optional<SafeTensors> file;
    if (!tensors_file_.empty()) file = SafeTensors::open(tensors_file_);
    TensorView qkv[3];
    for (std::size_t i = 0; i < std::size(kInputs); ++i) {
      TensorView view = load(i, file);
      const bool operand = kInputs[i].option == nullptr;
      if (operand && !view.given()) {
        throw Error(std::string(kInputs[i].name) + " is missing: give " + flag_of(kInputs[i].name) +
                    " FILE.npy, or --tensors FILE.safetensors with a tensor of that name");
      }
      if (operand && !dtype_.empty()) view = owned_.emplace_back(converted(view, dtype_named(dtype_))).view();
      note_longest(kInputs[i].name, view, options);
      if (gpu_ && view.given()) view = gpu_->copy(view);
      (operand ? qkv[i] : options.*kInputs[i].option) = view;
    }
    compute(qkv[0], qkv[1], qkv[2], options);
  }

 private:
  // Refuses outputs that would replace what is read, or each other.
  void keep_inputs() const {
    std::vector<std::pair<std::string, std::string>> read = {{"--tensors", tensors_file_}};
    for (std::size_t i = 0; i < std::size(kInputs); ++i) read.emplace_back(flag_of(kInputs[i].name), files_[i]);
    for (const auto& [flag, path] : {std::pair{"--out", out_}, {"--lse", lse_}}) {
      for (const auto& [input, from] : read) {
        if (path.empty() || from.empty() || !same_file(path, from)) continue;
        throw Error(std::string(flag) + " is " + path + ", the file that " + input + " is read from: name another");
      }
    }
    if (!lse_.empty() && same_file(out_, lse_)) {
      throw Error("--lse is " + lse_ + ", the file that --out names: name another");
    }
  }

  // The longest sequence of packed tensors, which is not looked for on a GPU.
  void note_longest(const std::string& name, const TensorView& cu, AttentionOptions& options) const {
    if (!gpu_ || !cu.given() || cu.dtype != DType::i32 || cu.rank != 1 || !cu.contiguous()) return;
    std::int64_t* const longest = name == "cu_seqlens_q"   ? &options.max_seqlen_q
                                  : name == "cu_seqlens_k" ? &options.max_seqlen_k
                                                           : nullptr;
    if (longest == nullptr) return;
    const auto* at = static_cast<const std::int32_t*>(cu.data);
    for (std::int64_t b = 1; b < cu.shape[0]; ++b) *longest = std::max<std::int64_t>(*longest, at[b] - at[b - 1]);
  }

  TensorView load(std::size_t i, const std::optional<SafeTensors>& file) {
    const bool in_file = file && file->contains(kInputs[i].name);
    if (!files_[i].empty()) {
      if (in_file) {
        throw Error(std::string(kInputs[i].name) + " is given twice: by " + flag_of(kInputs[i].name) + " and in " +
                    tensors_file_);
      }
      return owned_.emplace_back(read_npy("run", files_[i])).view();
    }
    return in_file ? file->tensor(kInputs[i].name) : TensorView();
  }

  void compute(const TensorView& q, const TensorView& k, const TensorView& v, const AttentionOptions& options) {
    const auto candidates = explain_attention(q, k, v, options);  // checks the arguments before anything is allocated
    std::string chosen;
    for (const Candidate& c : candidates) {
      if (c.chosen) chosen = c.name;
    }
    std::vector<std::int64_t> shape(q.shape.begin(), q.shape.begin() + q.rank);
    shape.back() = v.shape[v.rank - 1];
    const HostTensor o(q.dtype, shape);
    const bool packed = q.rank == 3;
    const HostTensor lse(
        DType::f32, packed ? std::vector{q.shape[1], q.shape[0]} : std::vector{q.shape[0], q.shape[2], q.shape[1]});
    const std::size_t workspace = attention_forward_workspace(q, k, v, options);
    const double seconds =
        gpu_ ? compute_on_gpu(q, k, v, o, lse, options, workspace) : compute_here(q, k, v, o, lse, options, workspace);
    write_npy(out_, o.view());
    if (!lse_.empty()) write_npy(lse_, lse.view());

    if (common_.json) {
      const auto extents = [](const TensorView& view) {
        return std::vector<std::int64_t>(view.shape.begin(), view.shape.begin() + view.rank);
      };
      Json out = {{"q", extents(q)},        {"k", extents(k)},           {"v", extents(v)},
                  {"o", extents(o.view())}, {"dtype", name_of(q.dtype)}, {"candidate", chosen}};
      add_place(out, device_);
      out["workspace_bytes"] = workspace;
      out["seconds"] = seconds;
      out["out"] = out_;
      if (!lse_.empty()) out["lse"] = lse_;
      std::cout << out.dump(2) << '\n';
      return;
    }
    std::cout << "q " << q.shape_text() << ", k " << k.shape_text() << ", v " << v.shape_text() << ", "
              << name_of(q.dtype) << ": " << chosen << ", " << seconds_text(seconds) << ", workspace "
              << bytes_text(static_cast<double>(workspace)) << "\no " << o.view().shape_text() << " -> " << out_
              << '\n';
    if (!lse_.empty()) std::cout << "lse " << lse.view().shape_text() << " -> " << lse_ << '\n';
  }

  // Each computes o and lse once and returns the call's seconds.
  static double compute_here(const TensorView& q, const TensorView& k, const TensorView& v, const HostTensor& o,
                             const HostTensor& lse, const AttentionOptions& options, std::size_t workspace) {
    WorkspaceBuffer buffer;
    Runtime runtime;
    runtime.workspace = buffer.get(workspace);
    const auto begin = std::chrono::steady_clock::now();
    attention_forward(q, k, v, o.view(), lse.view(), options, runtime);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  double compute_on_gpu(const TensorView& q, const TensorView& k, const TensorView& v, const HostTensor& o,
                        const HostTensor& lse, const AttentionOptions& options, std::size_t workspace) {
    const TensorView o_there = gpu_->allocate(o.view()), lse_there = gpu_->allocate(lse.view());
    const Runtime runtime = gpu_->runtime(workspace);
    const double seconds = gpu_->seconds([&] { attention_forward(q, k, v, o_there, lse_there, options, runtime); });
    gpu_->read(o_there, o.data());
    gpu_->read(lse_there, lse.data());
    return seconds;
  }

  CommonFlags common_;
  OptionFlags options_;
  std::optional<Gpu> gpu_;
  std::string device_ = "cpu";
  std::string tensors_file_, dtype_, out_, lse_;
  std::array<std::string, std::size(kInputs)> files_;
  std::list<HostTensor> owned_;
};

}  // namespace

void add_run(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("run", "Attention over q, k and v in .npy or safetensors files");
  examples(*verb, {"heddle run --q q.npy --k k.npy --v v.npy --causal bottom_right -o o.npy",
                   "heddle run --tensors qkv.safetensors --dtype f32 -o o.npy --lse lse.npy --json",
                   "heddle run --q q.npy --k k.npy --v v.npy --device cuda -o o.npy"});
  const auto self = std::make_shared<Run>();
  self->add_to(*verb);
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
