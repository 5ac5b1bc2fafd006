HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {
inline std::size_t BackwardScratch(const AttentionBackwardProblem&) { return 0; }
inline void Backward(const AttentionBackwardProblem&, const BackwardTask&, std::byte*) {}
}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
