"""Maps: give tensors the names and layouts of another program, by moving bytes, and by arithmetic where a rule says so.

In: the text of a map (TOML), and the names and lazy tensors of a checkpoint. Out: the lazy tensors under their new
names. Nothing is opened here. `notation` reads rules, `file` whole maps and the catalogue, `claims` finds the rule of
each name, `sizes` the sizes of axes, `values` numbers to compute with, and `compile` applies a map in either direction.

A map has two sides, named by the keys of its rules. A side is one tensor or a list of them; a tensor is a name, and
after a colon its axes:

    [[rule]]
    megatron = "decoder.layers.{l}.self_attention.linear_qkv.weight : (g (q + k + v) d) h"
    hf = ["model.layers.{l}.self_attn.q_proj.weight : (g q d) h",
          "model.layers.{l}.self_attn.k_proj.weight : (g k d) h",
          "model.layers.{l}.self_attn.v_proj.weight : (g v d) h"]

    [sizes]
    g = ["num_key_value_heads", "num_attention_heads"]
    d = ["head_dim", "hidden_size / num_attention_heads"]
    k = 1
    v = 1

    [keep]
    hf = ["*.inv_freq"]
    [drop]
    megatron = ["*._extra_state"]

- `a b` are two axes, `(a b)` is one composed of both, `(a + b)` one that holds `a` and after it `b`. `1`, `2` … are
  axes of that size. Products bind tighter than sums: `(g q d + g p d)` is `((g q d) + (g p d))`.
- Sums are expanded tensor by tensor, axis by axis, left to right, into pieces. Piece i of one side is piece i of the
  other, and both have the same axes.
- `_` in a sum is padding: dropped on one way, zero on the other.
- `{l}` in the names of all tensors of a rule stands for one part of a name, without a dot. `{e}` in some names, where
  other tensors have an axis `e`, counts the indices of a stack: 0, 1, … without a gap.
- `{2 l + 1}` is the index times a number, plus a number or a size.
- Rules without axes rename. With `copied = true`, the one tensor of a side becomes each of the other side's, whole;
  on the way back these must be equal.
- `values.hf = "megatron * sqrt(d)"` computes a side's elements from those of the other; both sides have a text.
- `a.{l} | b.{l} : h` are alternatives, as releases of a framework differ in names: any is read, the first is written.
  Those without axes have the axes of the last. All tensors of a rule have as many, which belong together, or one.
- A name that several rules have belongs to the most special one, all of whose names the others have too. Of rules with
  the same names it belongs to the one of which all tensors are there.
- The same rules must read the result of a map on the way back.
- A size is a number, an expression over config.json, or a list of these, of which the first counts that is there. All
  other sizes follow from shapes, in each place where a rule applies by itself.
- `keep` (names that pass unchanged) and `drop` (left out) are lists of globs, of one side or, as `keep = [...]` at the
  top of the file, of both. A glob is compared with the whole name and with each of its endings after a dot.
"""

from __future__ import annotations

PAGES = ("maps.md", "map-catalogue.md", "internals/maps.md")
NEEDS = ("companions",)
SCRIPTS = ("maps/", "record_maps.py", "map_catalogue.py")
