"""The compiled library: how it is built, which build a processor takes, and how it is loaded.

Takes the C++ sources of the package (the attention kernels beside their backend, the operations of a model step in
here) and gives one shared library with a plain C ABI. It knows no pages, tables or models. Nothing is loaded on import;
`build` and `variants` need only the standard library, so that the package's build can run them.
"""
