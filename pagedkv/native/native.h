// What marks an exported function of the library.
#pragma once

// C linkage and a visible symbol; everything else is hidden (-fvisibility=hidden).
#define PAGEDKV_C_API extern "C" __attribute__((visibility("default")))
