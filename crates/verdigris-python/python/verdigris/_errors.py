"""What can go wrong, by whose fault it is. The words are the library's own."""


class Error(Exception):
    """Everything that this package raises of its own."""


class GraphError(Error, ValueError, RuntimeError):
    """A graph, an op or an attribute breaks a rule; the message names the tensor, the two values that disagree, and the rule.

    PyTorch raises `ValueError` for some of these and `RuntimeError` for others; this is both.
    """


class OutOfRangeError(GraphError, IndexError):
    """A dim or a class that there is none of."""


class BindingError(Error, ValueError, RuntimeError):
    """A tensor that is bound to a plan does not suit it: another type, other dims or strides, too short, misaligned, overlapping, elsewhere."""


class EngineError(Error, ValueError):
    """There is no engine of that name, or no part of the graph is taken by a pinned one."""


class NoEngineError(Error, RuntimeError):
    """No engine takes a problem under the policy; the message has every refusal with its reason."""


class UnsupportedError(Error, NotImplementedError):
    """Something that PyTorch has and this package does not take. Nothing was computed."""


class ConstantError(UnsupportedError):
    """A gradient that is 0 wherever it exists: the result does not vary with the tensor."""


class DeviceError(Error, RuntimeError):
    """The machine: no driver, no device, a failed call."""


class OutOfMemoryError(DeviceError, MemoryError):
    """Memory is lacking; less may help."""


class ConfigError(Error, ValueError):
    """A setting, a variable of the environment or a device's name has no meaning."""
