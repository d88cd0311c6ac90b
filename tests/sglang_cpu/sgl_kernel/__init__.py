"""In place of SGLang's compiled kernels, which it imports on a CPU but does not call where that has no AMX."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_arguments, **_options):
        raise NotImplementedError(f"sgl_kernel.{name}: the CPU kernels of SGLang are not installed")

    return kernel
