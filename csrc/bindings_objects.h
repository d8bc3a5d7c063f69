// Python's objects as the guard and the caches of a step look at them; errors are Python's own exceptions.
#pragma once

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace int4moe {

// Borrowed; null where there is none.
inline PyObject* find(const nb::object& attributes, const nb::object& name) {
  PyObject* found = PyDict_GetItemWithError(attributes.ptr(), name.ptr());
  if (!found && PyErr_Occurred()) nb::raise_python_error();
  return found;
}

inline nb::object attribute(PyObject* of, const nb::object& name) {
  PyObject* found = PyObject_GetAttr(of, name.ptr());
  if (!found) nb::raise_python_error();
  return nb::steal(found);
}

inline bool is_true(int answer) {
  if (answer < 0) nb::raise_python_error();
  return answer != 0;
}

inline bool has_type(PyObject* object, const nb::object& type) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.ptr();
}

}  // namespace int4moe
