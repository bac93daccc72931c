# Flags that every target of the project is compiled with.
#
# -ffp-contract=off and no fast-math: a sum means the same at every optimisation level, so that
# results agree between builds. -O3, because g++ 12 does not unroll the kernels' constant loops at -O2.
add_library(kvreplay_flags INTERFACE)
target_compile_options(kvreplay_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
    -ffp-contract=off>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O3>
  # Tests and the command line are large and run once: compiling them is what takes time, more than
  # twice as much of it under the sanitizers at -O1.
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:$<TARGET_PROPERTY:KVREPLAY_COLD>>>:$<IF:$<BOOL:${KVREPLAY_ASAN}>,-O0,-O1>>)
if(KVREPLAY_WERROR)
  target_compile_options(kvreplay_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(KVREPLAY_ASAN)
  target_compile_options(kvreplay_flags INTERFACE
    # Without the checks that a null or wild pointer trips over anyway: they double the compile time.
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined -fno-sanitize-recover=undefined
      -fno-sanitize=null,vptr,object-size,pointer-overflow,nonnull-attribute,returns-nonnull-attribute
      -fno-omit-frame-pointer>)
  target_link_options(kvreplay_flags INTERFACE -fsanitize=address,undefined)
endif()

# The main function of every doctest program, compiled once.
if(BUILD_TESTING)
  add_library(kvreplay_test_main OBJECT ${PROJECT_SOURCE_DIR}/cmake/test_main.cc)
  target_link_libraries(kvreplay_test_main PUBLIC kvreplay_flags doctest::doctest)
endif()

# kvreplay_module(NAME [DEPENDS target...] [EXCLUDE file...])
#
# One folder, one library `kvreplay_NAME` from its *.cpp, one doctest program `NAME_test` from its
# *_test.cpp (registered with CTest), and one program per *_bench.cpp. A new file is picked up
# without an edit here.
function(kvreplay_module name)
  cmake_parse_arguments(ARG "" "" "DEPENDS;EXCLUDE" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS *.cpp)
  set(tests ${sources})
  set(benches ${sources})
  list(FILTER tests INCLUDE REGEX "_test\\.cpp$")
  list(FILTER benches INCLUDE REGEX "_bench\\.cpp$")
  list(FILTER sources EXCLUDE REGEX "(_test|_bench)\\.cpp$")
  foreach(file IN LISTS ARG_EXCLUDE)
    list(FILTER sources EXCLUDE REGEX "/${file}$")
  endforeach()

  add_library(kvreplay_${name} STATIC ${sources})
  target_include_directories(kvreplay_${name} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(kvreplay_${name} PUBLIC kvreplay_flags fmt::fmt ${ARG_DEPENDS})

  if(BUILD_TESTING AND tests)
    add_executable(${name}_test ${tests})
    set_target_properties(${name}_test PROPERTIES KVREPLAY_COLD ON)
    target_link_libraries(${name}_test PRIVATE kvreplay_${name} kvreplay_test_main)
    target_compile_definitions(${name}_test PRIVATE
      KVREPLAY_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
      KVREPLAY_BINARY_DIR="${PROJECT_BINARY_DIR}")
    add_test(NAME ${name} COMMAND ${name}_test)
    set_tests_properties(${name} PROPERTIES TIMEOUT 900)
  endif()
  if(KVREPLAY_BENCHMARKS)
    foreach(file IN LISTS benches)
      get_filename_component(bench ${file} NAME_WE)
      add_executable(${bench} ${file})
      target_link_libraries(${bench} PRIVATE kvreplay_${name} benchmark::benchmark)
      target_compile_definitions(${bench} PRIVATE KVREPLAY_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
    endforeach()
  endif()
endfunction()
