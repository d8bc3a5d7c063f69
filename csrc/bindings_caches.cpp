#include "bindings_caches.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "bindings.h"
#include "bindings_objects.h"

namespace int4moe {

namespace {

// GrowingLayer.place: its kind, then these, then for each sequence the addresses of keys and values and their strides
// by head and token.
struct Place {
  int64_t room, inference, rows;
};
struct Sequence {
  int64_t keys, values, strides[4];
};

struct Names {
  nb::object update, initialized, length, place;
  static nb::object interned(const char* name) { return nb::steal(PyUnicode_InternFromString(name)); }
};

// They live as long as the interpreter.
const Names& names() {
  static const Names* const all = new Names{Names::interned("update"), Names::interned("is_initialized"),
                                            Names::interned("length"), Names::interned("place")};
  return *all;
}

// -1 where it is no number of tokens.
int64_t tokens(PyObject* length) {
  return length && PyLong_CheckExact(length) ? int64_t(PyLong_AsSsize_t(length)) : -1;
}

}  // namespace

PyDecodeCaches::PyDecodeCaches(int layers, int rows, nb::bytes kind, nb::object layer_type, bool inference)
    : layers_(layers), rows_(rows), kind_(std::move(kind)), layer_type_(std::move(layer_type)), inference_(inference) {
  if (layers < 1 || rows < 1) throw std::invalid_argument("a step has a layer and a row at least");
  where_.resize(size_t(layers) * size_t(rows));
  attributes_.reserve(size_t(layers));
}

bool PyDecodeCaches::add(nb::object layers) {
  if (!PyList_CheckExact(layers.ptr()) || PyList_Size(layers.ptr()) != layers_) return false;
  const size_t before = attributes_.size();
  size_t count = 0;
  int64_t length = -1;
  for (int i = 0; i < layers_; ++i) {
    if (!add_layer(i, PyList_GetItem(layers.ptr(), i), count, length)) {
      attributes_.resize(before);
      return false;
    }
  }
  lengths.insert(lengths.end(), count, length);
  return count > 0;
}

// count and length: rows and tokens of the first layer, which all have to have.
bool PyDecodeCaches::add_layer(int layer, PyObject* object, size_t& count, int64_t& length) {
  if (!has_type(object, layer_type_)) return false;
  nb::object own = nb::steal(PyObject_GenericGetDict(object, nullptr));
  if (!own.is_valid()) nb::raise_python_error();
  const int64_t here = tokens(find(own, names().length));
  PyObject* bytes = find(own, names().place);
  if (here < 0 || !bytes || !PyBytes_CheckExact(bytes)) return false;
  if (find(own, names().initialized) != Py_True || find(own, names().update)) return false;
  const char* data = PyBytes_AsString(bytes);
  const size_t size = size_t(PyBytes_Size(bytes));
  Place place;
  if (size < kind_.size() + sizeof place || std::memcmp(data, kind_.c_str(), kind_.size()) != 0) return false;
  data += kind_.size();
  std::memcpy(&place, data, sizeof place);
  data += sizeof place;
  if (here >= place.room || (place.inference && !inference_)) return false;
  if (layer == 0) {
    count = size_t(place.rows);
    length = here;
  }
  const size_t first = lengths.size();
  if (here != length || size_t(place.rows) != count || first + count > size_t(rows_)) return false;
  if (size != kind_.size() + sizeof place + count * sizeof(Sequence)) return false;
  for (size_t r = 0; r < count; ++r) {
    Sequence s;
    std::memcpy(&s, data + r * sizeof s, sizeof s);
    where_[size_t(layer) * size_t(rows_) + first + r] = {address<uint16_t>(uintptr_t(s.keys)),
                                                         address<uint16_t>(uintptr_t(s.values)),
                                                         {s.strides[0], s.strides[1]},
                                                         {s.strides[2], s.strides[3]}};
  }
  attributes_.push_back({std::move(own), here});
  return true;
}

bool PyDecodeCaches::complete() const {
  std::vector<PyObject*> all;
  for (const Attributes& a : attributes_) all.push_back(a.dict.ptr());
  std::sort(all.begin(), all.end());
  return lengths.size() == size_t(rows_) && std::adjacent_find(all.begin(), all.end()) == all.end();
}

void PyDecodeCaches::extend() const {
  nb::object longer;
  int64_t last = -1;
  for (const Attributes& a : attributes_) {
    if (tokens(find(a.dict, names().length)) != a.length) throw std::runtime_error("a cache has changed during a step");
    if (last != a.length) longer = nb::int_((last = a.length) + 1);
    if (PyDict_SetItem(a.dict.ptr(), names().length.ptr(), longer.ptr())) nb::raise_python_error();
  }
}

}  // namespace int4moe
