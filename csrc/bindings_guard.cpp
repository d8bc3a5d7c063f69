// What a plan of int4moe_ipex/models/decode_plan.py relies on in a model's Python objects, looked at before every step.
// A step streams the weights through the CPU's caches, so that a look takes as long as fetching all that it touches:
// what is known to come is asked for in advance.
#include <nanobind/nanobind.h>

#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_objects.h"

namespace int4moe {

namespace {

// As the DLPack standard, version 1, lays them out: torch describes a tensor in one call, without Python objects.
struct ArrayView {
  void* data;
  int32_t device_type, device;
  int32_t ndim;
  uint8_t type_code, type_bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct ArrayExchange {
  uint32_t major, minor;
  const void* older;
  void (*others[3])();
  int (*describe)(void* object, ArrayView* view);  // -1 and a Python exception where it cannot
};

constexpr int kDims = 2;  // of a weight, at most

enum class Kind { kSame, kEquals, kModule, kMissing, kEmpty, kHooks };

struct Check {
  Kind kind;
  bool again;  // of the same attributes as the one before
  nb::object attributes, name, value, type;
};

struct Items {
  nb::object list;
  std::vector<nb::object> items;
};

struct Weight {
  nb::object parameters, name, tensor, type;
  uintptr_t parts[2];  // torch's own objects of the tensor, which are only ever asked for in advance
  ArrayView view;
  int64_t shape[kDims], strides[kDims];
};

// GCC drops calls of functions that do nothing but __builtin_prefetch.
void ask_for(uintptr_t p, int bytes) {
  for (int at = 0; at < bytes; at += 64) __asm__ volatile("prefetcht0 (%0)" : : "r"(p + uintptr_t(at)));
}

void ask_for(const nb::object& object) { ask_for(uintptr_t(object.ptr()), 1); }

// Where a dict keeps its entries, as far as one can guess: whatever its last two words are is asked for, no more.
void ask_for_entries(const nb::object& dict) {
  uintptr_t words[2];
  std::memcpy(words, reinterpret_cast<char*>(dict.ptr()) + PyDict_Type.tp_basicsize - sizeof words, sizeof words);
  ask_for(words[0], 256);
  ask_for(words[1], 192);
}

void ask_early(const Check& c) {
  if (!c.again) ask_for(c.attributes);
  ask_for(c.value);
}
void ask_late(const Check& c) {
  if (!c.again) ask_for_entries(c.attributes);
}

void ask_early(const Weight& w) {
  ask_for(w.parameters);
  ask_for(w.tensor);
  ask_for(w.parts[0], 256);
  ask_for(w.parts[1], 128);
}
void ask_late(const Weight& w) { ask_for_entries(w.parameters); }

// Whether `holds` is true of all, in their order; early and late: how many entries ahead each is asked for.
template <class T, class Holds>
bool all_of(const std::vector<T>& entries, size_t early, size_t late, Holds holds) {
  const size_t count = entries.size();
  for (size_t i = 0; i < count + early; ++i) {
    if (i < count) ask_early(entries[i]);
    const size_t next = i + late - early;  // wraps around before the first
    if (next < count) ask_late(entries[next]);
    if (i >= early && !holds(entries[i - early])) return false;
  }
  return true;
}

// The dict's own object for a name that it has, so that looking it up compares two pointers.
nb::object own_name(nb::dict attributes, nb::str name) {
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(attributes.ptr(), &at, &key, &value);) {
    if (PyUnicode_Check(key) && PyUnicode_Compare(key, name.ptr()) == 0) return nb::borrow(key);
  }
  PyObject* interned = name.release().ptr();
  PyUnicode_InternInPlace(&interned);
  return nb::steal(interned);
}

class Guard {
 public:
  // watched: of a dict of hooks that is not empty, whether any of them counts.
  // exchange: torch.Tensor.__dlpack_c_exchange_api__, or None.
  Guard(nb::object watched, nb::object exchange) : watched_(std::move(watched)) {
    if (exchange.is_none()) return;
    const auto* api = static_cast<const ArrayExchange*>(PyCapsule_GetPointer(exchange.ptr(), "dlpack_exchange_api"));
    if (!api) nb::raise_python_error();
    if (api->major == 1) describe_ = api->describe;
  }

  bool sees_weights() const { return describe_ != nullptr; }

  // The attribute is this object, or has an equal value (None where there is none), or is this module, of its class.
  void same(nb::dict attributes, nb::str name, nb::object value) { add(Kind::kSame, attributes, name, value); }
  void equals(nb::dict attributes, nb::str name, nb::object value) { add(Kind::kEquals, attributes, name, value); }
  void module(nb::dict siblings, nb::str name, nb::object module) { add(Kind::kModule, siblings, name, module); }

  // Somebody watches where there is such an attribute, where this one is not empty, or holds hooks that count.
  void missing(nb::dict attributes, nb::str name) { add(Kind::kMissing, attributes, name, nb::none()); }
  void empty(nb::dict attributes, nb::str name) { add(Kind::kEmpty, attributes, name, attributes[name]); }
  void hooks(nb::dict attributes, nb::str name) { add(Kind::kHooks, attributes, name, attributes[name]); }

  // The dict has as many entries as now, the list the items that it has now, the class the forward that it has now.
  void size(nb::dict dict) { sizes_.emplace_back(dict, PyDict_Size(dict.ptr())); }
  void items(nb::list list) {
    Items all{list, {}};
    for (nb::handle item : list) all.items.push_back(nb::borrow(item));
    items_.push_back(std::move(all));
  }
  void forward_of(nb::object type) { forwards_.emplace_back(type, attribute(type.ptr(), forward_)); }

  // The parameter has the address, dtype, shape and strides that it has now, and requires no gradient.
  // first, second: addresses of torch's own objects of it.
  void weight(nb::dict parameters, nb::str name, uintptr_t first, uintptr_t second) {
    if (!describe_) throw std::invalid_argument("this torch describes no tensors");
    nb::object tensor = parameters[name];
    Weight w{parameters, own_name(parameters, name), tensor, nb::borrow(tensor.type()), {first, second}, {}, {}, {}};
    if (describe_(tensor.ptr(), &w.view)) nb::raise_python_error();
    if (w.view.ndim > kDims) throw std::invalid_argument("a weight has two dimensions at most");
    for (int i = 0; i < w.view.ndim; ++i) {
      w.shape[i] = w.view.shape[i];
      w.strides[i] = w.view.strides[i];
    }
    weights_.push_back(std::move(w));
  }

  enum Seen { kFits, kWatched, kChanged };

  Seen look() const {
    bool watched = false;
    bool fits = all_of(checks_, 32, 16, [&](const Check& c) {
      const Seen seen = look_at(c, watched);
      watched |= seen == kWatched;
      return seen != kChanged;
    });
    for (const auto& [dict, size] : sizes_) fits = fits && PyDict_Size(dict.ptr()) == size;
    for (const Items& all : items_) fits = fits && are_in(all);
    for (const auto& [type, forward] : forwards_) fits = fits && attribute(type.ptr(), forward_).is(forward);
    fits = fits && all_of(weights_, 12, 4, [&](const Weight& w) { return is_same(w); });
    return !fits ? kChanged : watched ? kWatched : kFits;
  }

  // For Python's collector of cycles: a model holds its plan, and that what it looks at.
  int traverse(visitproc visit, void* arg) const {
    int stop = 0;
    const auto each = [&](const auto&... held) {
      for (PyObject* p : {held.ptr()...}) stop = stop || !p ? stop : visit(p, arg);
    };
    each(watched_, forward_, requires_grad_);
    for (const Check& c : checks_) each(c.attributes, c.name, c.value, c.type);
    for (const auto& [dict, size] : sizes_) each(dict);
    for (const Items& all : items_) {
      each(all.list);
      for (const nb::object& item : all.items) each(item);
    }
    for (const auto& [type, forward] : forwards_) each(type, forward);
    for (const Weight& w : weights_) each(w.parameters, w.name, w.tensor, w.type);
    return stop;
  }

 private:
  void add(Kind kind, nb::dict attributes, nb::str name, nb::object value) {
    nb::object type = nb::borrow(value.type());
    const bool again = !checks_.empty() && checks_.back().attributes.is(attributes);
    checks_.push_back({kind, again, attributes, own_name(attributes, name), std::move(value), std::move(type)});
  }

  Seen look_at(const Check& c, bool watched) const {
    PyObject* found = find(c.attributes, c.name);
    PyObject* value = c.value.ptr();
    switch (c.kind) {
      case Kind::kSame:
        return found == value ? kFits : kChanged;
      case Kind::kModule:
        return found == value && has_type(found, c.type) ? kFits : kChanged;
      case Kind::kMissing:
        return found ? kWatched : kFits;
      case Kind::kEquals: {
        if (!found) found = Py_None;
        if (found == value) return kFits;
        if (value == Py_None) return kChanged;
        const nb::object other = nb::borrow(found);
        return is_true(PyObject_RichCompareBool(found, value, Py_NE)) ? kChanged : kFits;
      }
      case Kind::kEmpty:
      case Kind::kHooks: {
        if (!found) return kChanged;
        if (watched || (PyDict_Check(found) && PyDict_Size(found) == 0)) return kFits;
        const nb::object hooks = nb::borrow(found);
        if (!is_true(PyObject_IsTrue(found))) return kFits;
        return c.kind == Kind::kEmpty || is_true(PyObject_IsTrue(watched_(hooks).ptr())) ? kWatched : kFits;
      }
    }
    return kChanged;
  }

  static bool are_in(const Items& all) {
    PyObject* list = all.list.ptr();
    const Py_ssize_t count = Py_ssize_t(all.items.size());
    bool fits = PyList_Size(list) == count;
    for (Py_ssize_t i = 0; fits && i < count; ++i) fits = PyList_GetItem(list, i) == all.items[size_t(i)].ptr();
    return fits;
  }

  bool is_same(const Weight& w) const {
    PyObject* found = find(w.parameters, w.name);
    if (!found || !has_type(found, w.type)) return false;
    const nb::object tensor = nb::borrow(found);
    ArrayView v;
    if (describe_(found, &v)) {
      PyErr_Clear();  // of another kind by now
      return false;
    }
    bool same = v.data == w.view.data && v.device_type == w.view.device_type && v.type_code == w.view.type_code &&
                v.type_bits == w.view.type_bits && v.ndim == w.view.ndim;
    for (int i = 0; same && i < v.ndim; ++i) same = v.shape[i] == w.shape[i] && v.strides[i] == w.strides[i];
    return same && !is_true(PyObject_IsTrue(attribute(found, requires_grad_).ptr()));
  }

  nb::object watched_;
  nb::object forward_ = nb::steal(PyUnicode_InternFromString("forward"));
  nb::object requires_grad_ = nb::steal(PyUnicode_InternFromString("requires_grad"));
  int (*describe_)(void*, ArrayView*) = nullptr;
  std::vector<Check> checks_;
  std::vector<std::pair<nb::object, Py_ssize_t>> sizes_;
  std::vector<Items> items_;
  std::vector<std::pair<nb::object, nb::object>> forwards_;
  std::vector<Weight> weights_;
};

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Guard>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
  Guard nothing{nb::none(), nb::none()};
  std::swap(*nb::inst_ptr<Guard>(self), nothing);  // what it held goes when it looks at nothing any more
  return 0;
}

PyType_Slot kCollected[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                            {Py_tp_clear, reinterpret_cast<void*>(&clear)},
                            {0, nullptr}};

}  // namespace

void bind_guard(nb::module_& m) {
  nb::class_<Guard>(m, "Guard", nb::type_slots(kCollected))
      .def(nb::init<nb::object, nb::object>(), nb::arg("watched").none(), nb::arg("exchange").none())
      .def("sees_weights", &Guard::sees_weights)
      .def("same", &Guard::same, nb::arg(), nb::arg(), nb::arg().none())
      .def("equals", &Guard::equals, nb::arg(), nb::arg(), nb::arg().none())
      .def("module", &Guard::module)
      .def("missing", &Guard::missing)
      .def("empty", &Guard::empty)
      .def("hooks", &Guard::hooks)
      .def("size", &Guard::size)
      .def("items", &Guard::items)
      .def("forward_of", &Guard::forward_of)
      .def("weight", &Guard::weight)
      .def("look", [](const Guard& guard) { return int(guard.look()); },
           "0: all as it was; 1: so, but somebody watches; 2: something has changed");
}

}  // namespace int4moe
