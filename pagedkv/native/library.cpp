// What the loader asks a library before anything else: which sources it is, and whose thread pool it is bound to.

#include <dlfcn.h>
#include <omp.h>

#include "native.h"

// Digest of all sources and flags of this build, as `pagedkv.native.build.sources_digest` computes it.
PAGEDKV_C_API const char *pagedkv_sources() { return PAGEDKV_SOURCES; }

// Path of the OpenMP runtime that parallel regions of this library run on.
PAGEDKV_C_API const char *pagedkv_openmp() {
    Dl_info found;
    return dladdr(reinterpret_cast<const void*>(&omp_get_max_threads), &found) ? found.dli_fname : "";
}
