// The calls of every hand-off, bound without pybind11's matching of arguments; see hot.cpp.
#pragma once

#include "handle.hpp"

namespace busrl::python {

void bind_hot(const py::object& ring);
// The dtype of a usual name such as "int32", kept; null for anything else.
const py::dtype* named_dtype(const py::object& name);

}  // namespace busrl::python
