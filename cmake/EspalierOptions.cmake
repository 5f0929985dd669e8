# Language level, warnings and the flags that keep results the same everywhere:
# no fast-math, no contraction except explicit std::fma, and an x86-64-v2 baseline; faster SIMD is chosen at run time.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")

find_program(ESPALIER_CCACHE ccache)
if(ESPALIER_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${ESPALIER_CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${ESPALIER_CCACHE}")
endif()

add_library(espalier_flags INTERFACE)
target_compile_options(espalier_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Werror;-Wno-unused-parameter;-ffp-contract=off;-fno-math-errno>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
  # These three report std::string, std::variant and std::optional code that is right (GCC bugs 105329, 105651, 80635).
  target_compile_options(espalier_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict;-Wno-maybe-uninitialized;-Wno-stringop-overflow>")
endif()
# The same law for device code; constexpr functions of ours may be used there.
target_compile_options(espalier_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra,-Wno-unused-parameter,-ffp-contract=off>")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(ESPALIER_X86 ON)
  target_compile_options(espalier_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=x86-64-v2>)
endif()
if(ESPALIER_SANITIZE)
  target_compile_options(espalier_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${ESPALIER_SANITIZE};-fno-omit-frame-pointer;-g>")
  target_link_options(espalier_flags INTERFACE -fsanitize=${ESPALIER_SANITIZE})
  if(ESPALIER_SANITIZE MATCHES "undefined")
    target_compile_options(espalier_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=undefined>)
  endif()
endif()
if(ESPALIER_FUZZ)
  target_compile_options(espalier_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
  target_link_options(espalier_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
