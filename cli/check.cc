// heddle check: candidates against the reference, over the tests' case tables.
#include <algorithm>
#include <iostream>
#include <limits>
#include <memory>

#include "choices.h"
#include "core/check.h"
#include "core/files.h"
#include "heddle/error.h"
#include "heddle/runtime.h"
#include "kit/operations.h"
#include "output.h"
#include "problem.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

struct Verdict {
  kit::CaseResult result;
  std::string operation;
  kit::Purpose purpose;
  std::string target;  // of the CPU, or the GPU's name

  // The tensor that fails, or else the one that comes closest to its bound.
  const kit::Comparison* tightest() const {
    const kit::Comparison* worst = nullptr;
    for (const kit::Comparison& tensor : result.tensors) {
      if (worst == nullptr || share(tensor) > share(*worst)) worst = &tensor;
    }
    return worst;
  }
  static double share(const kit::Comparison& tensor) {
    if (!tensor.passed) return std::numeric_limits<double>::infinity();
    return tensor.bound > 0 ? tensor.error / tensor.bound : 0;
  }
};

DType dtype_or_e4m3(const std::string& name) {
  return name == "e4m3" || name == name_of(DType::f8e4m3) ? DType::f8e4m3 : dtype_named(name);
}

struct CheckVerb {
  CommonFlags common;
  std::vector<std::string> operations = {"attention"}, purposes, names, candidates, dtypes;
  std::string pass = "both", device = "cpu", precision = "f32";
  std::string digest;
  bool all_targets = false, list = false;

  std::vector<kit::OperationRow> selection() const {
    std::vector<DType> wanted;
    for (const std::string& dtype : dtypes) wanted.push_back(dtype_or_e4m3(dtype));
    const Precision kind = precision == "tf32"      ? Precision::tf32
                           : precision == "int8_qk" ? Precision::int8_qk
                                                    : Precision::f32;
    std::vector<kit::OperationRow> cases;
    for (const std::string& operation : kit::operation_names()) {
      const auto named = [&](const std::string& name) { return name == operation || name == "all"; };
      if (std::ranges::none_of(operations, named)) continue;
      if (device == "cuda" && operation != "attention") {
        throw Error("--device cuda is for --operation attention: the cases of " + operation + " are the CPU's");
      }
      for (kit::OperationRow& row : kit::operation_rows(operation, kind)) {
        const auto contained = [&](const std::string& part) { return row.name.find(part) != std::string::npos; };
        if (!purposes.empty() && std::ranges::find(purposes, kit::name_of(row.purpose)) == purposes.end()) continue;
        if (!names.empty() && std::ranges::none_of(names, contained)) continue;
        if (!wanted.empty() && std::ranges::find(wanted, row.dtype) == wanted.end()) continue;
        cases.push_back(std::move(row));
      }
    }
    if (cases.empty()) throw Error("no case of the table is left by --operation, --purpose, --name and --dtype");
    return cases;
  }

  bool asked(Pass which) const { return pass == "both" || pass == name_of_pass(which); }

  // The candidates of a case to check: those it has, or those asked for. One asked for that refuses the case is left
  // out.
  std::vector<std::string> wanted(const std::vector<std::string>& there) const {
    std::vector<std::string> chosen;
    for (const std::string& name : there) {
      if (candidates.empty() || std::ranges::find(candidates, name) != candidates.end()) chosen.push_back(name);
    }
    return chosen;
  }

  // Counts in `unserved` the passes of cases that none of the wanted candidates takes.
  std::vector<Verdict> run_all(const std::vector<kit::OperationRow>& cases, std::int64_t& unserved) const {
    const bool gpu = device == "cuda";
    if (gpu && kit::current_gpu().name.empty()) throw RuntimeError(kit::current_gpu().absence);
    const std::vector<std::string> targets = gpu           ? std::vector{kit::current_gpu().name}
                                             : all_targets ? cpu_targets()
                                                           : std::vector{cpu_target()};
    std::vector<Verdict> verdicts;
    for (const kit::OperationRow& row : cases) {
      if (std::ranges::none_of(row.passes, [&](Pass which) { return asked(which); })) continue;
      // The answers are computed once, whatever is judged by them.
      const std::unique_ptr<kit::OperationCase> answers = row.open(gpu ? Device::cuda : Device::cpu);
      for (const Pass which : row.passes) {
        if (!asked(which)) continue;
        const std::vector<std::string> names = wanted(answers->candidates(which));
        if (names.empty()) ++unserved;
        for (const std::string& target : targets) {
          if (!gpu) set_cpu_target(target);
          for (const std::string& name : names) {
            verdicts.push_back({answers->check(which, name), row.operation, row.purpose, target});
          }
        }
      }
    }
    if (verdicts.empty()) throw Error("none of the chosen cases has a candidate to check: see `heddle explain`");
    return verdicts;
  }

  void run() const {
    common.apply();
    const auto cases = selection();
    if (list) {
      print_list(cases);
      return;
    }
    std::int64_t unserved = 0;
    const std::vector<Verdict> verdicts = run_all(cases, unserved);
    if (!digest.empty()) write_digest(verdicts);
    const auto failed = std::ranges::count_if(verdicts, [](const Verdict& v) { return !v.result.passed; });
    common.json ? print_json(verdicts, failed, unserved) : print_text(verdicts, failed, unserved);
    if (failed > 0) throw CLI::RuntimeError(1);
  }

  // One line a tensor: what it is of, and a hash of its bits.
  void write_digest(const std::vector<Verdict>& verdicts) const {
    std::string lines;
    for (const Verdict& v : verdicts) {
      for (const kit::Comparison& tensor : v.result.tensors) {
        char hash[17];
        std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(tensor.digest));
        lines += text(v.result.case_name, ' ', name_of_pass(v.result.pass), ' ', v.result.candidate, ' ', tensor.tensor,
                      ' ', hash, ' ', v.target, '\n');
      }
    }
    OutputFile file("check", digest, OutputFile::Existing::replace);
    file.write(lines.data(), lines.size());
    file.finish();
  }

  void print_list(const std::vector<kit::OperationRow>& cases) const {
    if (common.json) {
      Json out = Json::array();
      for (const kit::OperationRow& row : cases) {
        out.push_back({{"operation", row.operation}, {"name", row.name}, {"purpose", kit::name_of(row.purpose)}});
      }
      std::cout << out.dump(2) << '\n';
      return;
    }
    Table table({{"case"}, {"purpose"}, {"what"}});
    for (const kit::OperationRow& row : cases) table.add({row.name, kit::name_of(row.purpose), row.describe()});
    table.print();
  }

  static const char* name_of_pass(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }

  static void print_json(const std::vector<Verdict>& verdicts, std::int64_t failed, std::int64_t unserved) {
    Json out = {{"checked", verdicts.size()},
                {"failed", failed},
                {"unserved", unserved},
                {"threads", num_threads()},
                {"results", Json::array()}};
    for (const Verdict& v : verdicts) {
      Json tensors = Json::object();
      for (const kit::Comparison& tensor : v.result.tensors) {
        tensors[tensor.tensor] = {
            {"error", tensor.error},     {"bound", tensor.bound},   {"plain_error", tensor.plain_error},
            {"largest", tensor.largest}, {"passed", tensor.passed}, {"compared", tensor.compared}};
      }
      Json entry = {{"operation", v.operation},
                    {"case", v.result.case_name},
                    {"purpose", kit::name_of(v.purpose)},
                    {"pass", name_of_pass(v.result.pass)},
                    {"candidate", v.result.candidate},
                    {"target", v.target},
                    {"passed", v.result.passed},
                    {"seconds", v.result.seconds},
                    {"tensors", tensors}};
      if (!v.result.passed) entry["message"] = v.result.message();
      out["results"].push_back(entry);
    }
    std::cout << out.dump(2) << '\n';
  }

  static void print_text(const std::vector<Verdict>& verdicts, std::int64_t failed, std::int64_t unserved) {
    Table table({{"case"},
                 {"pass"},
                 {"candidate"},
                 {"target"},
                 {"verdict"},
                 {"tensor"},
                 {"error", Align::right},
                 {"bound", Align::right},
                 {"time", Align::right}});
    const auto number = [](double value) {
      char text[32];
      std::snprintf(text, sizeof text, "%.2e", value);
      return std::string(text);
    };
    for (const Verdict& v : verdicts) {
      const kit::Comparison* tensor = v.tightest();
      table.add({v.result.case_name, name_of_pass(v.result.pass), v.result.candidate, v.target,
                 v.result.passed ? green("ok") : red("FAILED"), tensor != nullptr ? tensor->tensor : "-",
                 tensor != nullptr ? number(tensor->error) : "-", tensor != nullptr ? number(tensor->bound) : "-",
                 seconds_text(v.result.seconds)});
    }
    table.print();
    for (const Verdict& v : verdicts) {
      if (!v.result.passed) std::cout << '\n' << v.target << ": " << v.result.message() << '\n';
    }
    std::cout << '\n' << verdicts.size() << " checks, " << failed << " failed";
    if (unserved > 0) std::cout << "; " << unserved << " passes of cases have no such candidate";
    std::cout << '\n';
  }
};

}  // namespace

void add_check(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("check", "Candidates against the reference, over the case tables");
  examples(*verb,
           {"heddle check --name causal_odd --candidate cpu --all-targets", "heddle check --operation linear --list",
            "heddle check --name causal_odd --device cuda --dtype bf16"});
  const auto self = std::make_shared<CheckVerb>();
  self->common.add_to(*verb);
  std::vector<std::string> choices = kit::operation_names();
  choices.emplace_back("all");
  one_of(verb->add_option("--operation", self->operations,
                          "The operations whose cases are taken; others than attention on the CPU"),
         choices)
      ->capture_default_str();
  one_of(verb->add_option("--purpose", self->purposes, "Only cases of these purposes"),
         {"round", "odd", "corner", "feature", "decode"});
  verb->add_option("--name", self->names, "Only cases whose name contains one of these");
  one_of(verb->add_option("--dtype", self->dtypes, "Only cases of these dtypes; e4m3 on a GPU"),
         {"f32", "f16", "bf16", "e4m3"}, dtype_or_e4m3);
  one_of(verb->add_option("--candidate", self->candidates, "Only these candidates (default: all but the reference)"),
         kernel_names());
  add_pass_flag(*verb, self->pass, /*with_both=*/true);
  add_device_flag(*verb, self->device);
  one_of(verb->add_option("--precision", self->precision,
                          "tf32: the rows in float32, multiplied in tf32; int8_qk: those in 16 bits, q k^T in int8 "
                          "(on a GPU)"),
         {"f32", "tf32", "int8_qk"})
      ->capture_default_str();
  verb->add_option("--digest", self->digest,
                   "A file for a hash of every result's bits, a line for each case, pass, candidate and tensor; with "
                   "--operation all, of every operation")
      ->type_name(kFile);
  verb->add_flag("--all-targets", self->all_targets, "With every SIMD target that runs here, one after the other");
  verb->add_flag("--list", self->list, "List the cases and run none");
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
