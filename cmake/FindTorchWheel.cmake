# Finds LibTorch as the PyPI wheel ships it and defines the imported targets torch_wheel::torch_cpu and, where
# the wheel has CUDA, torch_wheel::torch_cuda.
# find_package(Torch) of the wheel's own files demands a CUDA toolkit; headers and libraries are all that is needed.
#
# Searched in this order: FSDP_TORCH_ROOT (the folder "torch" inside site-packages), .venv of the source tree or of the
# including project, the python3 on the PATH.
set(FSDP_TORCH_ROOT "" CACHE PATH "The folder of the installed Python package torch (inside site-packages)")

if(NOT FSDP_TORCH_ROOT)
  file(GLOB _candidates
       "${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch"
       "${CMAKE_CURRENT_LIST_DIR}/../.venv/lib/python3*/site-packages/torch")
  if(NOT _candidates)
    execute_process(COMMAND python3 -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
                    OUTPUT_VARIABLE _candidates OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(_candidates)
    list(GET _candidates 0 _found)
    set(FSDP_TORCH_ROOT "${_found}" CACHE PATH "" FORCE)
  endif()
endif()

set(TorchWheel_VERSION "")
if(EXISTS "${FSDP_TORCH_ROOT}/version.py")
  file(STRINGS "${FSDP_TORCH_ROOT}/version.py" _line REGEX "__version__ = ")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" TorchWheel_VERSION "${_line}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchWheel
  REQUIRED_VARS FSDP_TORCH_ROOT
  VERSION_VAR TorchWheel_VERSION
  REASON_FAILURE_MESSAGE "no installed torch found: run scripts/setup.sh, or name one with -DFSDP_TORCH_ROOT=.../site-packages/torch")

if(TorchWheel_FOUND AND NOT TARGET torch_wheel::torch_cpu)
  add_library(torch_wheel::torch_cpu INTERFACE IMPORTED)
  target_include_directories(torch_wheel::torch_cpu SYSTEM INTERFACE
    "${FSDP_TORCH_ROOT}/include" "${FSDP_TORCH_ROOT}/include/torch/csrc/api/include")
  target_link_directories(torch_wheel::torch_cpu INTERFACE "${FSDP_TORCH_ROOT}/lib")
  target_link_libraries(torch_wheel::torch_cpu INTERFACE torch_cpu c10)
  # libtorch_cpu finds the libraries it needs by its own run path; the linker does not look there.
  get_filename_component(_site "${FSDP_TORCH_ROOT}" DIRECTORY)
  file(GLOB _needed "${_site}/nvidia/*/lib")
  target_link_options(torch_wheel::torch_cpu INTERFACE "LINKER:-rpath,${FSDP_TORCH_ROOT}/lib" "LINKER:--allow-shlib-undefined")
  foreach(_dir IN LISTS _needed)
    target_link_options(torch_wheel::torch_cpu INTERFACE "LINKER:-rpath-link,${_dir}")
  endforeach()
  # at::RecordFunction asserts in debug builds of its inline accessors; torch's headers warn about a GCC 12 flag.
  target_compile_options(torch_wheel::torch_cpu INTERFACE -Wno-interference-size)
endif()

# The CUDA side, when the wheel has it: headers and libraries of its nvidia packages, no toolkit.
if(TorchWheel_FOUND AND NOT TARGET torch_wheel::torch_cuda AND EXISTS "${FSDP_TORCH_ROOT}/lib/libtorch_cuda.so")
  get_filename_component(_site "${FSDP_TORCH_ROOT}" DIRECTORY)
  find_path(_cuda_include cuda_runtime_api.h PATHS "${_site}/nvidia/cu13/include" NO_DEFAULT_PATH NO_CACHE)
  find_path(_nccl_include nccl.h PATHS "${_site}/nvidia/nccl/include" NO_DEFAULT_PATH NO_CACHE)
  if(_cuda_include AND _nccl_include)
    add_library(torch_wheel::torch_cuda INTERFACE IMPORTED)
    target_include_directories(torch_wheel::torch_cuda SYSTEM INTERFACE "${_cuda_include}" "${_nccl_include}")
    target_link_directories(torch_wheel::torch_cuda INTERFACE "${_site}/nvidia/cu13/lib" "${_site}/nvidia/nccl/lib")
    target_link_libraries(torch_wheel::torch_cuda INTERFACE torch_wheel::torch_cpu torch_cuda c10_cuda
      -l:libcudart.so.13 -l:libnvrtc.so.13 -l:libnccl.so.2)
    target_link_options(torch_wheel::torch_cuda INTERFACE
      "LINKER:-rpath,${_site}/nvidia/cu13/lib" "LINKER:-rpath,${_site}/nvidia/nccl/lib")
  endif()
endif()
