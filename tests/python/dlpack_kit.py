"""Arrays of libraries that are not there: DLPack by hand, and a library on a GPU that nobody has."""

import ctypes

import numpy as np

_CODES = {"f": 2, "i": 0, "u": 1, "b": 6}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Producer:
    """An array of a library that can DLPack and nothing else. It says that it is on `device`; its memory is numpy's,
    wherever it says it is. `asked` has what __dlpack__ was called with."""

    def __init__(self, array, device=(1, 0), exported=None, read_only=False, old=False):
        self.array, self.device, self.read_only, self.old = array, device, read_only, old
        self.exported = device if exported is None else exported
        self.asked = []
        self._alive = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.old and set(options) - {"stream"}:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        self.asked.append(options)
        a = self.array
        shape = (ctypes.c_int64 * a.ndim)(*a.shape)
        strides = (ctypes.c_int64 * a.ndim)(*(s // a.itemsize for s in a.strides))
        tensor = _Tensor(a.ctypes.data, *self.exported, a.ndim, _CODES[a.dtype.kind], 8 * a.itemsize, 1)
        tensor.shape, tensor.strides = ctypes.addressof(shape), ctypes.addressof(strides)
        if options.get("max_version", (0,))[0] >= 1:
            managed, name = _Versioned(1, 0, None, None, int(self.read_only), tensor), b"dltensor_versioned"
        else:
            managed, name = _Managed(tensor, None, None), b"dltensor"
        self._alive.append((shape, strides, managed))
        return _new(ctypes.addressof(managed), name, None)


def zeros(shape, dtype=np.float32, **options):
    return Producer(np.zeros(shape, dtype), **options)
