# heddle_precompile(target header...): headers that take most of the time for compiling the target's C++ sources, which then
# load them as the compiler left them. Sources still include what they use.
function(heddle_precompile target)
  target_precompile_headers(${target} PRIVATE ${ARGN})
  # Without it ccache would not see which precompiled header an object depends on, and keep none.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
endfunction()
