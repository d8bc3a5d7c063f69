// The key/value caches of a decoding step, as int4moe_ipex/models/decode.py hands them to the core.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "core/decode.h"

namespace nb = nanobind;

namespace int4moe {

// For every row of a step where its keys and values are in every layer, and the layers' attributes, to count the token.
class PyDecodeCaches {
 public:
  // kind: what `GrowingLayer.place` of each layer starts with; layer_type: GrowingLayer.
  // inference: whether torch is in inference mode, which alone may write to tensors made in it.
  PyDecodeCaches(int layers, int rows, nb::bytes kind, nb::object layer_type, bool inference);

  // The layers of one cache, of one or several of the rows. False where one is of another kind or class, has an
  // `update` of its own, no room for one more token, or another length than the first: nothing was added then.
  bool add(nb::object layers);
  // Whether every row has its cache, and no layer is there twice.
  bool complete() const;
  // One token more in all of them.
  void extend() const;

  int layers() const { return layers_; }
  int rows() const { return rows_; }
  const DecodeCache* where() const { return where_.data(); }  // [layers, rows]

  std::vector<int64_t> lengths;  // tokens, of the rows so far

 private:
  struct Attributes {
    nb::object dict;
    int64_t length;
  };
  bool add_layer(int layer, PyObject* object, size_t& count, int64_t& length);

  int layers_, rows_;
  nb::bytes kind_;
  nb::object layer_type_;
  bool inference_;
  std::vector<DecodeCache> where_;
  std::vector<Attributes> attributes_;
};

}  // namespace int4moe
