"""Translates inline PTX, the asm statements of device code, into C++ for the CPU backend.

A statement becomes a call of a lambda: each operand is a variable of its bits, each instruction a statement on them,
and what it writes goes to the operands at the end. TABLE says what the instructions mean, mostly by a function of
cpu/foreign/ptx.h. The input is preprocessed, so that macros have become text, and every line keeps its number.
"""

import ast
import json
import re

from cu2cpp import TranslationError, _closing, code_of

TYPES = {
    "b8": "std::uint8_t", "u8": "std::uint8_t", "s8": "std::int8_t", "b16": "std::uint16_t", "u16": "std::uint16_t",
    "s16": "std::int16_t", "b32": "std::uint32_t", "u32": "std::uint32_t", "s32": "std::int32_t",
    "b64": "std::uint64_t", "u64": "std::uint64_t", "s64": "std::int64_t", "b128": "ptx::Wide", "f32": "float",
    "f64": "double", "f16": "ptx::F16", "bf16": "ptx::Bf16", "f16x2": "ptx::F16x2",
    "bf16x2": "ptx::Bf16x2", "pred": "bool",
}
# A register, by the size of its type; an operand, by its constraint.
REGISTERS = {8: "std::uint8_t", 16: "std::uint16_t", 32: "std::uint32_t", 64: "std::uint64_t",
             128: "cuda_cpu::ptx::Wide"}
CONSTRAINTS = {"r": 32, "f": 32, "l": 64, "d": 64, "h": 16, "q": 128}
_SMALL = [f"ptx::{name}" for name in ("F16", "Bf16", "F16x2", "Bf16x2")]
_LANE = "cuda_cpu::lane_id()"
_CLUSTER = "static_cast<unsigned>(cuda_cpu::cluster_size())"
SPECIAL = {
    **{f"{name}.{axis}": f"::{cuda}.{axis}" for axis in "xyz" for name, cuda in (
        ("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"), ("nctaid", "gridDim"))},
    "laneid": _LANE,
    "warpid": "ptx::warp_of_thread()",
    "nwarpid": "((::blockDim.x * ::blockDim.y * ::blockDim.z + 31) / 32)",
    "smid": "ptx::multiprocessor()",
    "nsmid": "cuda_cpu::multiprocessors()",
    "gridid": "0",
    "clock": "::clock64()", "clock64": "::clock64()", "clock_hi": "(::clock64() >> 32)",
    "globaltimer": "cuda_cpu::nanoseconds()", "globaltimer_lo": "cuda_cpu::nanoseconds()",
    "globaltimer_hi": "(cuda_cpu::nanoseconds() >> 32)",
    "lanemask_eq": f"(1u << {_LANE})", "lanemask_lt": f"((1u << {_LANE}) - 1)",
    "lanemask_le": f"((2u << {_LANE}) - 1)", "lanemask_gt": f"(~1u << {_LANE})", "lanemask_ge": f"(~0u << {_LANE})",
    "cluster_ctarank": "cuda_cpu::cluster_rank()", "cluster_nctarank": _CLUSTER,
    "cluster_ctaid.x": "cuda_cpu::cluster_rank()", "cluster_ctaid.y": "0", "cluster_ctaid.z": "0",
    "cluster_nctaid.x": _CLUSTER, "cluster_nctaid.y": "1", "cluster_nctaid.z": "1",
    "clusterid.x": f"(::blockIdx.x / {_CLUSTER})", "clusterid.y": "::blockIdx.y", "clusterid.z": "::blockIdx.z",
    "nclusterid.x": f"(::gridDim.x / {_CLUSTER})", "nclusterid.y": "::gridDim.y", "nclusterid.z": "::gridDim.z",
    "is_explicit_cluster": f"({_CLUSTER} > 1)",
}


class Unknown(Exception):
    """What is not known, or not understood, in words."""


class OfTheHost(Exception):
    """An asm statement that is no PTX: an operand of it is of a kind that only the host's processor has."""


# ---- What instructions mean ------------------------------------------------------------------------


def _compare(x):
    """setp: one predicate, or two, the second for the opposite; with a third predicate that is combined with both."""
    type_ = x["T"]
    compare = x["compare"]
    operators = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=",
                 "hi": ">", "hs": ">="}
    a, b = x.value(1, type_), x.value(2, type_)
    unordered = f"({a} != {a} || {b} != {b})"
    if compare in ("num", "nan"):
        result = unordered if compare == "nan" else f"!{unordered}"
    elif compare in operators:
        result = f"({a} {operators[compare]} {b})"
        if compare == "ne" and type_[0] in "f":
            result = f"(!{unordered} && {result})"
    else:
        result = f"({unordered} || {a} {operators[compare[:-1]]} {b})"
    combine = {"and": "&&", "or": "||", "xor": "!="}.get(x["bool"])
    if x.code.startswith("set."):
        one = "1.0f" if x["D"] == "f32" else "~0u"
        return x.write(0, f"({result} ? {one} : {one[:0]}{'0.0f' if x['D'] == 'f32' else '0u'})")
    first, second = x.pair(0)
    with_third = f" {combine} {x.value(3, 'pred')}" if combine else ""
    done = f"const bool cuda_cpu_is = {result}; " + x.put(first, f"cuda_cpu_is{with_third}")
    if second:
        done += x.put(second, f"!cuda_cpu_is{with_third}")
    return done


def _move(x):
    """mov, also of {...} to one register that holds them all, or back."""
    type_ = x["T"]
    if x.is_vector(1):
        parts = x.registers(1)
        size = x.bits(type_) // len(parts)
        number = REGISTERS[x.bits(type_)]
        return x.write(0, " | ".join(f"{number}({x.read(part, f'b{size}')}) << {size * k}"
                                     for k, part in enumerate(parts)))
    if x.is_vector(0):
        parts = x.registers(0)
        size = x.bits(type_) // len(parts)
        return f"const auto cuda_cpu_all = {x.value(1, type_)}; " + "".join(
            x.put(part, f"ptx::as<{REGISTERS[size]}>(cuda_cpu_all >> {size * k})") for k, part in enumerate(parts))
    return x.write(0, x.value(1, type_))


def _generic_address(x):
    if x["space"].startswith("shared"):
        return x.write(0, f"ptx::as<std::uint64_t>(ptx::shared({x.value(1, 'u64')}))")
    return x.write(0, x.value(1, "u64"))


def _window_address(x):
    if x["space"].startswith("shared"):
        return x.write(0, f"cuda_cpu::shared_window({x.value(1, 'pointer')})")
    return x.write(0, x.value(1, "u64"))


def _convert(x):
    rounding = {"n": "nearest", "z": "zero", "m": "down", "p": "up"}[(x["round"] or "rn")[1]]
    if not x["round"] and x["T"][0] in "us" and x["U"][0] in "bf":
        raise Unknown("a conversion to a whole number needs .rni, .rzi, .rmi or .rpi")
    return x.write(0, f"ptx::convert<{x.type('T')}>({x.value(1, x['U'])}, ptx::Round::{rounding}, "
                      f"{'true' if x['sat'] else 'false'})", x["T"])


def _load(x):
    """One access, as wide as the vector."""
    type_, count = x.type("T"), int(x["count"] or 1)
    order = {"relaxed": "relaxed", "acquire": "acquire"}.get(x["order"])
    to = x.registers(0) if count > 1 else None
    if count > 1 and len(to) != count:
        raise Unknown(f"{len(to)} registers for a vector of {count}")
    if type_ in _SMALL:
        type_ = REGISTERS[x.bits(x["T"])]
    pointer = x.value(1, f"pointer to {type_}")
    if order:
        done = f"auto* const cuda_cpu_at = {pointer}; "
        for k, part in enumerate(to or [x.operands[0]]):
            load = f"ptx::load_ordered(cuda_cpu_at + {k}, std::memory_order_{order}, cuda_cpu_site)"
            done += x.put(part, load, x["T"])
        return done
    volatile = "volatile " if x["order"] == "volatile" else ""
    if count == 1:
        return x.put(x.operands[0], f"*({volatile}{type_} const*)({pointer})", x["T"])
    vector = f"ptx::Pack<{type_}, {count}>::Type"
    return (f"const {vector} cuda_cpu_all = *({vector} const*)({pointer}); " + "".join(
        x.put(part, f"cuda_cpu_all[{k}]", x["T"]) for k, part in enumerate(to)))


def _store(x):
    type_, count, name = x.type("T"), int(x["count"] or 1), x["T"]
    order = {"relaxed": "relaxed", "release": "release"}.get(x["order"])
    parts = x.registers(1) if count > 1 else [x.operands[1]]
    if len(parts) != count:
        raise Unknown(f"{len(parts)} registers for a vector of {count}")
    if type_ in _SMALL:
        name = f"b{x.bits(name)}"
        type_ = TYPES[name]
    pointer = x.value(0, f"pointer to {type_}")
    values = [x.read(part, name) for part in parts]
    if order:
        return f"auto* const cuda_cpu_at = {pointer}; " + "".join(
            f"ptx::store_ordered<{type_}>(cuda_cpu_at + {k}, {value}, std::memory_order_{order}); "
            for k, value in enumerate(values))
    if count == 1:
        volatile = "volatile " if x["order"] == "volatile" else ""
        return f"*({volatile}{type_}*)({pointer}) = {values[0]};"
    vector = f"ptx::Pack<{type_}, {count}>::Type"
    return f"*({vector}*)({pointer}) = {vector}{{{', '.join(values)}}};"


def _atomic(x):
    """atom, and red, whose operands are one fewer."""
    first = 1 if x.code.startswith("atom") else 0
    what, name = x["what"], x["T"]
    signed = {"b32": "u32", "b64": "u64"}.get(name, name)
    type_ = TYPES[signed]
    parts = x.registers(first + 1) if x["count"] else [x.operands[first + 1]]
    pointer = x.value(first, f"pointer to {type_}")
    calls = []
    for k, part in enumerate(parts):
        value, at = x.read(part, signed), f"cuda_cpu_at + {k}"
        if what == "add" and type_ in _SMALL:
            call = f"cuda_cpu::atomic_update({at}, [&]({type_} cuda_cpu_old) {{ return cuda_cpu_old + {value}; }})"
        elif what in ("min", "max"):
            call = f"ptx::atomic_{'least' if what == 'min' else 'most'}<{type_}>({at}, {value})"
        elif what == "cas":
            call = f"ptx::atomic_exchange_if<{type_}>({at}, {value}, {x.value(first + 2, signed)}, cuda_cpu_site)"
        else:
            function = {"add": "Add", "exch": "Exch", "and": "And", "or": "Or", "xor": "Xor", "inc": "Inc",
                        "dec": "Dec"}[what]
            site = ", cuda_cpu_site" if what in ("exch", "or") or what == "add" else ""
            call = f"::atomic{function}({at}, {value}{site})"
        calls.append(call)
    done = f"auto* const cuda_cpu_at = {pointer}; "
    if x["order"] in ("release", "acq_rel"):  # which is a fence before the operation
        done += f"::__threadfence{'_block' if x['scope'] == 'cta' else ''}(); "
    if not first:
        return done + "; ".join(calls) + ";"
    to = x.registers(0) if x["count"] else [x.operands[0]]
    return done + " ".join(x.put(part, call, name) for part, call in zip(to, calls))


def _barrier(x):
    """bar.sync of all threads, or of a number of them."""
    if len(x.operands) == 2:
        return f"cuda_cpu::named_barrier({x.value(0, 's32')}, {x.value(1, 's32')}, cuda_cpu_site);"
    return f"cuda_cpu::barrier_of_block({x.value(0, 's32')}, cuda_cpu_site);"


def _elect(x):
    lane, chosen = x.pair(0)
    return (f"const bool cuda_cpu_is = ptx::elect({x.value(1, 'u32')}, cuda_cpu_site); " + x.put(chosen, "cuda_cpu_is")
            + x.put(lane, f"cuda_cpu::countr_zero({x.value(1, 'u32')})"))


def _shuffle(x):
    to, inside = x.pair(0)
    kind = ["idx", "up", "down", "bfly"].index(x["kind"])
    mask = x.value(4, "u32") if len(x.operands) > 4 else "~0u"
    return (f"bool cuda_cpu_is; " + x.put(to, f"ptx::shuffle<{kind}>({x.value(1, 'u32')}, {x.value(2, 'u32')}, "
                                              f"{x.value(3, 'u32')}, {mask}, &cuda_cpu_is, cuda_cpu_site)")
            + (x.put(inside, "cuda_cpu_is") if inside else ""))


def _match_all(x):
    to, same = x.pair(0)
    value, mask = x.value(1, x["T"]), x.value(2, "u32")
    return (f"const unsigned cuda_cpu_same = ::__match_any_sync({mask}, {value}, cuda_cpu_site); "
            + x.put(to, f"(cuda_cpu_same == {mask} ? cuda_cpu_same : 0u)")
            + (x.put(same, f"cuda_cpu_same == {mask}") if same else ""))


def _arrive(x):
    """An arrival, or several, or with announced bytes; gives what identifies the phase."""
    barrier, rank = x.value(1, "barrier"), x.value(1, "rank")
    more = x.value(2, "s32") if len(x.operands) > 2 else None
    count = more if more and not x["tx"] else "1"
    return x.write(0, f"ptx::arrive({barrier}, {rank}, {more if x['tx'] else 0}, {count}, cuda_cpu_site)")


def _copy(x):
    size, bytes_ = x.value(2, "u32"), x.value(2, "u32")
    if len(x.operands) > 3:
        third = x.operands[3]
        ignore = x.kind(third) == "bool"
        bytes_ = f"({x.read(third, 'pred')} ? 0u : {size})" if ignore else x.read(third, "u32")
        if x["hint"] and len(x.operands) == 4:
            bytes_ = size
    to, from_ = x.value(0, "shared"), x.value(1, "pointer")
    return f"cuda_cpu::async_copies().add(ptx::copy({to}, {from_}, {size}, {bytes_}));"


def _bulk_load(x):
    if x["multicast"]:
        raise Unknown("cp.async.bulk of plain bytes to several blocks")
    return (f"cuda_cpu::bulk_copy({x.value(0, 'own')}, {x.value(1, 'pointer')}, {x.value(2, 's32')}, "
            f"{x.value(3, 'own barrier')}, cuda_cpu::kOwnRank, cuda_cpu_site);")


def _coordinates(x, number):
    """The map and the coordinates in [map, {x, y}]."""
    map_, at = x.map(number)
    if len(at) != int(x["dims"]):
        raise Unknown(f"{len(at)} coordinates for {x['dims']} dimensions")
    return (f"const int cuda_cpu_at[] = {{{', '.join(x.read(each, 's32') for each in at)}}}; ",
            f"reinterpret_cast<const CUtensorMap*>({map_}), {len(at)}, cuda_cpu_at")


def _tensor_load(x):
    declared, map_ = _coordinates(x, 1)
    ranks = x.value(3, "u16") if x["multicast"] else "0"
    return (f"{declared}cuda_cpu::tensor_load({x.value(0, 'own')}, {map_}, {x.value(2, 'own barrier')}, {ranks}, "
            "cuda_cpu_site);")


def _tensor_store(x):
    declared, map_ = _coordinates(x, 0)
    return f"{declared}cuda_cpu::tensor_store({map_}, {x.value(1, 'own')}, cuda_cpu_site);"


def _bulk_reduce(x):
    kinds = {"f32": ("add",), "f64": ("add",), "f16": ("add", "min", "max"), "bf16": ("add", "min", "max")}
    if x["what"] not in kinds.get(x["T"], (x["what"],)):
        raise Unknown(f"there is no instruction {x.code}")
    barrier = f"{x.value(3, 'own barrier')}, {x.value(0, 'rank')}, " if "mbarrier" in x.code else ""
    to = x.value(0, "own" if barrier else "pointer to void")
    return (f"cuda_cpu::bulk_reduce(ptx::reduce<ptx::Reduce::of_{x['what']}, {x.type('T')}>, {to}, "
            f"{x.value(1, 'own')}, {x.value(2, 's32')}, {barrier}cuda_cpu_site);")


def _tensor_reduce(x):
    declared, map_ = _coordinates(x, 0)
    return (f"{declared}cuda_cpu::tensor_reduce(ptx::reduction_of<ptx::Reduce::of_{x['what']}>, {map_}, "
            f"{x.value(1, 'own')}, cuda_cpu_site);")


def _transposes(x):
    return "true" if ".trans" in x.code else "false"


def _ldmatrix(x):
    count, at = int(x["count"]), x.value(1, "u32")
    return (f"std::uint32_t cuda_cpu_to[{count}]; ptx::Row cuda_cpu_row = {{}}; "
            f"if (ptx::gives_row({count})) cuda_cpu_row = *static_cast<ptx::Row*>(ptx::shared({at})); "
            f"ptx::ldmatrix<{_transposes(x)}>(cuda_cpu_to, cuda_cpu_row, cuda_cpu_site); "
            + x.put_all(0, "cuda_cpu_to", count))


def _stmatrix(x):
    count, at = int(x["count"]), x.value(0, "u32")
    return (x.array("cuda_cpu_from", 1, count)
            + f"const ptx::Row cuda_cpu_row = ptx::stmatrix<{_transposes(x)}>(cuda_cpu_from, cuda_cpu_site); "
            f"if (ptx::gives_row({count})) *static_cast<ptx::Row*>(ptx::shared({at})) = cuda_cpu_row;")


_ELEMENTS = {"f16": "ptx::Short<cuda_cpu::HalfFormat>", "bf16": "ptx::Short<cuda_cpu::Bfloat16Format>",
             "tf32": "ptx::Tf32", "s8": "ptx::Byte<std::int8_t>", "u8": "ptx::Byte<std::uint8_t>", "e4m3": "ptx::E4m3"}


def _mma(x):
    if x["D"] != x["C"]:
        raise Unknown("a product whose sums have two types")
    count = len(x.registers(0))
    sums = {"f32": "float", "f16": "ptx::F16", "s32": "int"}[x["D"]]
    return (x.array("cuda_cpu_a", 1) + x.array("cuda_cpu_b", 2) + x.array("cuda_cpu_c", 3, count)
            + f"std::uint32_t cuda_cpu_d[{count}]; ptx::mma<{_ELEMENTS[x['A']]}, {_ELEMENTS[x['B']]}, {sums}, "
            f"{x['depth']}, {'true' if '.satfinite' in x.code else 'false'}>("
            "cuda_cpu_d, cuda_cpu_a, cuda_cpu_b, cuda_cpu_c, cuda_cpu_site); " + x.put_all(0, "cuda_cpu_d", count))


def _wgmma(x):
    """The sum is written later, so its registers are the program's variables themselves."""
    if x["A"] != x["B"]:
        raise Unknown("a product of two types")
    sums = x.registers(0)
    halves = x["D"] == "f16"
    if halves and x["A"] not in ("f16", "e4m3"):
        raise Unknown(f"a product of {x['A']} with a sum of fp16")
    if len(sums) != int(x["columns"]) // (4 if halves else 2):
        raise Unknown(f"{len(sums)} registers for a sum of {x['columns']} columns")
    short = x["A"] in ("f16", "bf16")
    flags = [x.value(number, "s32") for number in range(4, len(x.operands))]
    flags += ["1", "1", "0", "0"][len(flags) :]
    from_registers = x.is_vector(1)
    if from_registers and short and len(x.operands) == 7:
        flags[2:] = ["0", flags[2]]
    a = "0, cuda_cpu_a" if from_registers else f"{x.value(1, 'u64')}, nullptr"
    kind = {"f16": "fp16", "bf16": "bf16", "tf32": "tf32", "e4m3": "e4m3"}[x["A"]]
    transposed, tall = (f"{flags[2]} != 0", f"{flags[3]} == 0") if short else ("false", "true")
    return ((x.array("cuda_cpu_a", 1, 4) if from_registers else "") + f"ptx::check_scale({flags[0]}, {flags[1]}); "
            f"cuda_cpu::wgmma(cuda_cpu::Wgmma::{kind}, ptx::sum_registers({', '.join(map(x.variable, sums))}), "
            f"{len(sums)}, {a}, {transposed}, {x.value(2, 'u64')}, {tall}, {x.value(3, 'pred')}, cuda_cpu_site"
            f"{', true' if halves else ''});")


# A row is a pattern of the instruction, and what it does. In a pattern [...] may be missing, | is "or", (name:...) has
# a name, and T and U stand for a type. What it does is C++: what operand 0 becomes, or, with a ";", a statement. There
# $1 is operand 1 as a number of type T, $1:u32 one of that type, $1:U likewise; %T is T in C++; #name the text of a
# named part, ?name whether it is there. Or it is a function, which gives the statement.
_FP = "[.rn|.rz|.rm|.rp][.ftz]"
_FLOATS = "(T:f32|f64|f16|bf16|f16x2|bf16x2)"
_SPACE = "[.(space:global|shared|shared::cta|shared::cluster|local|const|param)]"
_SCOPE = "[.cta|.cluster|.gpu|.sys]"
_SHARED = "[.shared|.shared::cta|.shared::cluster]"
_HINTS = ("[.L1::evict_normal|.L1::evict_unchanged|.L1::evict_first|.L1::evict_last|.L1::no_allocate]"
          "[.L2::evict_last|.L2::evict_first|.L2::evict_normal][.(hint:L2::cache_hint)][.L2::64B|.L2::128B|.L2::256B]")
_BULK = "cp.async.bulk"
_TENSOR = "cp.async.bulk.tensor.(dims:1|2|3|4|5)d"
_COMPLETES = ".mbarrier::complete_tx::bytes[.(multicast:multicast::cluster)][.L2::cache_hint]"
_REDUCE = "cp.reduce.async.bulk"
_REDUCES = "(what:and|or|xor|add|inc|dec|min|max)"
_COMPARE = ("(compare:eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan)[.(bool:and|or|xor)][.ftz]")
TABLE = {
    # Arithmetic.
    f"add{_FP}.T": "ptx::add<%T>($1, $2)",
    f"sub{_FP}.T": "ptx::sub<%T>($1, $2)",
    f"mul{_FP}.{_FLOATS}": "ptx::mul<%T>($1, $2)",
    f"(what:add|sub|mul){_FP}.sat.{_FLOATS}": "ptx::saturate<%T>(ptx::#what<%T>($1, $2))",
    "(what:add|sub).sat.s32": "ptx::saturated(ptx::#what<std::int64_t>($1:s32, $2:s32))",
    "mul.lo.T": "ptx::mul<%T>($1, $2)",
    "mul.hi.T": "ptx::mul_hi<%T>($1, $2)",
    "mul.wide.T": "ptx::mul_wide<%T>($1, $2)",
    "mul24.lo.T": "ptx::mul24<%T>($1, $2)",
    "mad.lo.T": "ptx::add<%T>(ptx::mul<%T>($1, $2), $3)",
    "mad.hi.T": "ptx::add<%T>(ptx::mul_hi<%T>($1, $2), $3)",
    "mad.wide.T": "ptx::add<ptx::Twice<%T>>(ptx::mul_wide<%T>($1, $2), ptx::as<ptx::Twice<%T>>($3:u64))",
    "mad24.lo.T": "ptx::add<%T>(ptx::mul24<%T>($1, $2), $3)",
    f"(fma|mad){_FP}.{_FLOATS}": "ptx::fma<%T>($1, $2, $3)",
    f"(fma|mad){_FP}.sat.{_FLOATS}": "ptx::saturate<%T>(ptx::fma<%T>($1, $2, $3))",
    "add.cc.T": "ptx::add_carry<%T>($1, $2, false, true)",
    "addc[.(set:cc)].T": "ptx::add_carry<%T>($1, $2, true, ?set)",
    "sub.cc.T": "ptx::sub_carry<%T>($1, $2, false, true)",
    "subc[.(set:cc)].T": "ptx::sub_carry<%T>($1, $2, true, ?set)",
    "mad.lo.cc.T": "ptx::add_carry<%T>(ptx::mul<%T>($1, $2), $3, false, true)",
    "mad.hi.cc.T": "ptx::add_carry<%T>(ptx::mul_hi<%T>($1, $2), $3, false, true)",
    "madc.lo[.(set:cc)].T": "ptx::add_carry<%T>(ptx::mul<%T>($1, $2), $3, true, ?set)",
    "madc.hi[.(set:cc)].T": "ptx::add_carry<%T>(ptx::mul_hi<%T>($1, $2), $3, true, ?set)",
    "sad.T": "ptx::sad<%T>($1, $2, $3)",
    "div[.approx|.full|.rn][.ftz].T": "ptx::div<%T>($1, $2)",
    "rem.T": "ptx::rem<%T>($1, $2)",
    "abs[.ftz].T": "ptx::abs<%T>($1)",
    "neg[.ftz].T": "ptx::neg<%T>($1)",
    "min[.ftz].T": "ptx::least<%T>($1, $2)",
    "max[.ftz].T": "ptx::most<%T>($1, $2)",
    "min[.ftz].NaN.(T:f32|f16|bf16)": "ptx::least_or_nan<%T>($1, $2)",
    "max[.ftz].NaN.(T:f32|f16|bf16)": "ptx::most_or_nan<%T>($1, $2)",
    "ex2.approx[.(ftz:ftz)].f32": "ptx::flushed<?ftz>(ptx::exp2_of<float>($1:f32))",
    "ex2.approx[.ftz].(T:f16|bf16|f16x2|bf16x2)": "ptx::exp2_of<%T>($1)",
    "lg2.approx[.ftz].f32": "::log2f($1:f32)",
    "rcp[.approx|.rn][.(ftz:ftz)].f32": "ptx::flushed<?ftz>(1.0f / $1:f32)",
    "rcp.(rn|approx.ftz).f64": "(1.0 / $1:f64)",
    "rsqrt.approx[.ftz].f32": "::rsqrtf($1:f32)",
    "rsqrt.approx[.ftz].f64": "::rsqrt($1:f64)",
    "sqrt[.approx|.rn][.ftz].f32": "::sqrtf($1:f32)",
    "sqrt.rn.f64": "::sqrt($1:f64)",
    "sin.approx[.ftz].f32": "::sinf($1:f32)",
    "cos.approx[.ftz].f32": "::cosf($1:f32)",
    "tanh.approx.(T:f32|f16|bf16|f16x2|bf16x2)": "ptx::tanh_of<%T>($1)",
    "copysign.(T:f32|f64)": "std::copysign($2, $1)",
    # Bits.
    "and.T": "%T($1 & $2)",
    "or.T": "%T($1 | $2)",
    "xor.T": "%T($1 ^ $2)",
    "not.pred": "!$1:pred",
    "not.T": "%T(~$1)",
    "cnot.T": "%T($1 == 0)",
    "shl.T": "ptx::shl<%T>($1, $2:u32)",
    "shr.T": "ptx::shr<%T>($1, $2:u32)",
    "shf.((left:l)|r).((clamp:clamp)|wrap).b32": "ptx::shf(?left, ?clamp, $1:u32, $2:u32, $3:u32)",
    "prmt.b32": "::__byte_perm($1:u32, $2:u32, $3:u32)",
    "lop3.b32": "ptx::lop3($1:u32, $2:u32, $3:u32, $4:u32)",
    "bfe.T": "ptx::bfe<%T>($1, $2:u32, $3:u32)",
    "bfi.T": "ptx::bfi<%T>($1, $2, $3:u32, $4:u32)",
    "bfind[.(shift:shiftamt)].T": "ptx::bfind<%T>($1, ?shift)",
    "popc.b32": "::__popc($1:u32)",
    "popc.b64": "::__popcll($1:u64)",
    "clz.b32": "::__clz($1:s32)",
    "clz.b64": "::__clzll($1:s64)",
    "brev.T": "ptx::reversed<%T>($1)",
    "dp4a.T.U": "ptx::dp4a<ptx::Quarter<%T>, ptx::Quarter<%U>>($1:u32, $2:u32, $3:u32)",
    # Moves, comparisons, conversions.
    "mov.T": _move,
    "cvta.(space:shared|shared::cta|shared::cluster|global|local|const|param).u64": _generic_address,
    "cvta.to.(space:shared|shared::cta|shared::cluster|global|local|const|param).u64": _window_address,
    f"setp.{_COMPARE}.T": _compare,
    f"set.{_COMPARE}.(D:u32|s32|f32).T": _compare,
    "selp.T": "($3:pred ? $1 : $2)",
    "cvt.rn[.satfinite][.(relu:relu)].(T:f16x2|bf16x2).f32": "ptx::packed<%T>($1:f32, $2:f32, ?relu)",
    "cvt.(rn|(away:rna))[.satfinite].tf32.f32": "ptx::to_tf32($1:f32, ?away)",
    "cvt[.(round:rn|rz|rm|rp|rni|rzi|rmi|rpi)][.ftz][.(sat:sat|satfinite)].T.U": _convert,
    # Memory.
    f"(ld|ldu)[.(order:relaxed|acquire|volatile|weak)]{_SCOPE}{_SPACE}[::entry][.nc][.ca|.cg|.cs|.lu|.cv|.nc]{_HINTS}"
    "[.v(count:2|4)].T": _load,
    f"ld{_SPACE}.(order:relaxed|acquire|volatile){_SCOPE}{_HINTS}[.v(count:2|4)].T": _load,
    f"st{_SPACE}.(order:relaxed|release|volatile){_SCOPE}{_HINTS}[.v(count:2|4)].T": _store,
    f"st[.(order:relaxed|release|volatile|weak)]{_SCOPE}{_SPACE}[.wb|.cg|.cs|.wt]{_HINTS}[.v(count:2|4)].T": _store,
    f"(atom|red)[.(order:relaxed|acquire|release|acq_rel)][.(scope:cta|cluster|gpu|sys)]{_SPACE}[.(what:and|or|xor|cas|exch|add|inc|dec|min|max)]"
    "[.noftz][.L2::cache_hint][.v(count:2|4)].T": _atomic,
    f"(atom|red)[.(order:relaxed|acquire|release|acq_rel)][.(scope:cta|cluster|gpu|sys)]{_SPACE}{_SCOPE}.(what:and|or|xor|cas|exch|add|inc|dec|min"
    "|max)[.noftz].T": _atomic,
    "membar.cta": "::__threadfence_block();",
    "membar.(gl|sys)": "::__threadfence();",
    "fence[.sc|.acq_rel|.acquire|.release].cta": "::__threadfence_block();",
    "fence[.sc|.acq_rel|.acquire|.release][.cluster|.gpu|.sys]": "::__threadfence();",
    # Programs rely on it for new barriers, too.
    "fence.proxy.async[.shared|.shared::cta|.shared::cluster]":
        "cuda_cpu::async_proxy_fence(); cuda_cpu::mbarrier_init_fence();",
    "fence.proxy.async.global": "cuda_cpu::async_proxy_fence();",
    f"fence.proxy.(alias|tensormap::generic.(acquire|release){_SCOPE})": ";",
    "fence.mbarrier_init.release.cluster": "cuda_cpu::mbarrier_init_fence();",
    "(prefetch|prefetchu)[.global|.const|.param][.tensormap][.L1|.L2|.L2::evict_last|.L2::evict_normal]": ";",
    "(applypriority|discard)[.global].(L2|L2::evict_normal)": ";",
    "createpolicy.(fractional|range).L2::(evict_first|evict_last|evict_normal|evict_unchanged)[.L2::evict_unchanged"
    "|.L2::evict_first].b64": "std::uint64_t{0}",
    "isspacep.(shared|shared::cta|shared::cluster)": "cuda_cpu::is_shared($1:pointer)",
    "isspacep.global": "!cuda_cpu::is_shared($1:pointer)",
    # Threads, warps, blocks.
    "(bar|barrier)[.cta].sync[.aligned]": _barrier,
    "(bar|barrier)[.cta].arrive[.aligned]": "cuda_cpu::named_arrive($0:s32, $1:s32, cuda_cpu_site);",
    "bar.warp.sync": "::__syncwarp($0:u32, cuda_cpu_site);",
    "activemask.b32": "::__activemask()",
    "vote[.sync].(what:all|any).pred": "::__#what_sync($2:u32, $1:pred, cuda_cpu_site)",
    "vote[.sync].ballot.b32": "::__ballot_sync($2:u32, $1:pred, cuda_cpu_site)",
    "match.any.sync.T": "::__match_any_sync($2:u32, $1, cuda_cpu_site)",
    "match.all.sync.T": _match_all,
    "redux.sync.(what:add|min|max|and|or|xor).T": "::__reduce_#what_sync($2:u32, $1, cuda_cpu_site)",
    "shfl[.sync].(kind:idx|up|down|bfly).b32": _shuffle,
    "elect.sync": _elect,
    "nanosleep.u32": "::__nanosleep($0:u32, cuda_cpu_site);",
    "trap": "::__trap();",
    "(griddepcontrol.launch_dependents|brkpt|pmevent)": ";",
    "griddepcontrol.wait": "cuda_cpu::wait_for_previous_kernel();",
    # What is released are new barriers, too.
    "barrier.cluster.arrive[.release][.aligned]":
        "cuda_cpu::mbarrier_init_fence(); cuda_cpu::cluster_arrive(true, cuda_cpu_site);",
    "barrier.cluster.arrive.relaxed[.aligned]": "cuda_cpu::cluster_arrive(false, cuda_cpu_site);",
    "barrier.cluster.wait[.acquire][.aligned]": "cuda_cpu::cluster_wait(cuda_cpu_site);",
    f"mapa{_SHARED}.u32": "ptx::map_to_rank($1:u32, $2:u32)",
    "mapa.u64": "ptx::as<std::uint64_t>(ptx::shared(ptx::map_to_rank(cuda_cpu::shared_window($1:pointer), $2:u32)))",
    "setmaxnreg.((grow:inc)|dec).sync.aligned.u32": "cuda_cpu::set_registers($0:s32, ?grow, cuda_cpu_site);",
    # Barriers in shared memory.
    f"mbarrier.init{_SHARED}.b64": "cuda_cpu::mbarrier_init($0:barrier, $1:s32, cuda_cpu_site);",
    f"mbarrier.inval{_SHARED}.b64": "cuda_cpu::mbarrier_invalidate($0:barrier, cuda_cpu_site);",
    f"mbarrier.expect_tx[.relaxed]{_SCOPE}{_SHARED}.b64":
        "cuda_cpu::mbarrier_expect($0:barrier, $0:rank, $1:s32, cuda_cpu_site);",
    f"mbarrier.arrive[.(tx:expect_tx)][.release|.relaxed]{_SCOPE}{_SHARED}.b64": _arrive,
    f"mbarrier.(test|try)_wait[.acquire|.relaxed]{_SCOPE}{_SHARED}.b64":
        "cuda_cpu::mbarrier_test($1:barrier, $2:u64 & 1, cuda_cpu_site)",
    f"mbarrier.(test|try)_wait.parity[.acquire|.relaxed]{_SCOPE}{_SHARED}.b64":
        "cuda_cpu::mbarrier_test($1:barrier, $2:s32, cuda_cpu_site)",
    # Copies.
    "cp.async.(ca|cg).shared[::cta].global[.(hint:L2::cache_hint)][.L2::64B|.L2::128B|.L2::256B]": _copy,
    "cp.async.commit_group": "cuda_cpu::async_copies().commit();",
    "cp.async.wait_group": "cuda_cpu::async_copies().wait($0:u32);",
    "cp.async.wait_all": "ptx::wait_for_copies();",
    f"cp.async.mbarrier.arrive{_SHARED}.b64": "ptx::wait_for_copies();",
    f"cp.async.mbarrier.arrive.noinc{_SHARED}.b64":
        "ptx::wait_for_copies(); ptx::arrive($0:barrier, cuda_cpu::kOwnRank, 0, 1, cuda_cpu_site);",
    f"{_BULK}.(shared::cluster|shared::cta).global{_COMPLETES}": _bulk_load,
    f"{_BULK}.shared::cluster.shared::cta.mbarrier::complete_tx::bytes":
        "cuda_cpu::bulk_copy($0:own, $1:own, $2:s32, $3:own barrier, $0:rank, cuda_cpu_site);",
    f"{_BULK}.global.shared::cta.bulk_group[.L2::cache_hint]":
        "cuda_cpu::bulk_store($0:pointer, $1:own, $2:s32, cuda_cpu_site);",
    f"{_TENSOR}.(shared::cluster|shared::cta).global[.tile]{_COMPLETES}": _tensor_load,
    f"{_TENSOR}.global.shared::cta[.tile].bulk_group[.L2::cache_hint]": _tensor_store,
    f"{_REDUCE}.global.shared::cta.bulk_group[.L2::cache_hint].{_REDUCES}[.noftz].T": _bulk_reduce,
    f"{_REDUCE}.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{_REDUCES}.(T:u32|s32|u64|s64)": _bulk_reduce,
    f"{_REDUCE}.tensor.(dims:1|2|3|4|5)d.global.shared::cta.{_REDUCES}[.tile].bulk_group[.L2::cache_hint]":
        _tensor_reduce,
    f"{_BULK}.prefetch.L2.global[.L2::cache_hint]": ";",
    f"{_BULK}.prefetch.tensor.(dims:1|2|3|4|5)d.L2.global[.tile][.L2::cache_hint]": ";",
    f"{_BULK}.commit_group": "cuda_cpu::bulk_commit();",
    f"{_BULK}.wait_group[.read]": "cuda_cpu::bulk_wait_read($0:s32, cuda_cpu_site);",
    "st.async[.weak].shared::cluster.mbarrier::complete_tx::bytes.f32":
        "cuda_cpu::store_push(static_cast<float*>($0:own), $1:f32, $2:own barrier, $0:rank, cuda_cpu_site);",
    # Tensor cores.
    "ldmatrix.sync.aligned[.trans][.m8n8].x(count:1|2|4)[.trans][.m8n8][.shared|.shared::cta][.trans].b16": _ldmatrix,
    "stmatrix.sync.aligned[.m8n8].x(count:1|2|4)[.trans][.m8n8][.shared|.shared::cta][.trans].b16[.trans]": _stmatrix,
    "movmatrix.sync.aligned.m8n8.trans.b16": "ptx::movmatrix($1:u32, cuda_cpu_site)",
    "mma.sync.aligned.m16n8k(depth:4|8|16|32).row.col[.satfinite].(D:f32|f16|s32).(A:f16|bf16|tf32|s8|u8|e4m3)"
    ".(B:f16|bf16|tf32|s8|u8|e4m3).(C:f32|f16|s32)[.satfinite]": _mma,
    "wgmma.fence.sync.aligned": "cuda_cpu::wgmma_fence();",
    "wgmma.commit_group.sync.aligned": "cuda_cpu::wgmma_commit();",
    "wgmma.wait_group.sync.aligned": "cuda_cpu::wgmma_wait($0:s32, cuda_cpu_site);",
    "wgmma.mma_async.sync.aligned.m64n(columns:N)k(depth:8|16|32).(D:f32|f16).(A:f16|bf16|tf32|e4m3)"
    ".(B:f16|bf16|tf32|e4m3)": _wgmma,
}


def _pattern(text):
    text = re.sub(r"\.([TU])(?=$|[.\[])", rf".(\1:{'|'.join(TYPES)})", text).replace(".", r"\.")
    text = re.sub(r"\((?:(\w+):(?!:))?", lambda match: f"(?P<{match[1]}>" if match[1] else "(?:", text)
    return re.compile(text.replace("[", "(?:").replace("]", ")?").replace(">N)", r">\d+)"))


_ROWS = [(_pattern(pattern), meaning) for pattern, meaning in TABLE.items()]


# ---- An instruction --------------------------------------------------------------------------------


class Instruction:
    """One instruction, its operands, and how they are read and written."""

    def __init__(self, code, operands, names):
        self.code, self.operands, self.names = code, operands, names
        self.match = None

    def translated(self):
        for pattern, meaning in _ROWS:
            if match := pattern.fullmatch(self.code):
                self.match = match
                return self._by(meaning) if isinstance(meaning, str) else meaning(self)
        raise Unknown(f"the CPU backend does not have the instruction {self.code}")

    def _by(self, meaning):
        text = meaning
        text = re.sub(r"\?([a-z]+)\b", lambda match: "true" if self[match[1]] else "false", text)
        text = re.sub(r"#([a-z]+?)(?=_sync|\b)", lambda match: self[match[1]], text)
        text = re.sub(r"%([TU])", lambda match: self.type(match[1]), text)
        text = re.sub(r"\$(\d)(?::(own barrier|\w+))?", self._operand, text)
        return text if text.endswith(";") else self.write(0, text)

    def _operand(self, match):
        type_ = match[2] or self["T"]
        return self.value(int(match[1]), self[type_] if type_ in "TU" else type_)

    def __getitem__(self, name):
        return self.match.groupdict().get(name)

    def type(self, name):
        return TYPES[self[name]]

    @staticmethod
    def bits(type_):
        return 1 if type_ == "pred" else 32 if type_.endswith("x2") else int(type_.lstrip("bfus"))

    def operand(self, number):
        if number >= len(self.operands):
            raise Unknown(f"{self.code} needs more than {len(self.operands)} operands")
        return self.operands[number]

    def value(self, number, type_):
        """Operand `number` as C++: of a type of PTX, or one of the kinds of addresses."""
        text = self.operand(number)
        if type_ in ("s32", "u32", "u16", "u64") or type_ in TYPES:
            if not text.startswith("["):
                return self.read(text, type_)
        address = self.address(text)
        if type_ in TYPES:
            return f"ptx::as<{TYPES[type_]}>({address})"
        shared = ".shared" in self.code
        if type_ == "pointer":
            return f"reinterpret_cast<void*>({address})"
        if type_.startswith("pointer to "):
            target = type_.removeprefix("pointer to ")
            if (self["space"] or "").startswith("shared"):
                return f"static_cast<{target}*>(ptx::shared({address}))"
            return f"reinterpret_cast<{target}*>({address})"
        if type_ == "shared":
            return f"ptx::shared({address})"
        if type_ == "own":
            return f"ptx::own({address})"
        if type_ == "own barrier" or (type_ == "barrier" and shared):
            return f"ptx::own<std::uint64_t>({address})"
        if type_ == "barrier":
            return f"reinterpret_cast<std::uint64_t*>({address})"
        assert type_ == "rank", type_
        return f"ptx::rank_of({address})" if shared else "cuda_cpu::kOwnRank"

    def address(self, text):
        """What is in [...], as a number."""
        match = re.fullmatch(r"\[?\s*([\w@%$.]+)\s*(?:([+-])\s*(-?\w+))?\s*\]?", text)
        if not match:
            raise Unknown(f"the address {text} is not understood")
        base, sign, offset = match.groups()
        base = self.read(base.strip(), "u64")
        return f"({base} {sign} {self.literal(offset, 's64')})" if sign else base

    def map(self, number):
        """The map, and the coordinates, of [map, {x, y, ...}]."""
        match = re.fullmatch(r"\[\s*(.+?)\s*,\s*\{(.*)\}\s*\]", self.operand(number), re.DOTALL)
        if not match:
            raise Unknown(f"{self.code} needs [map, {{coordinates}}]")
        return self.read(match[1], "u64"), [each.strip() for each in match[2].split(",")]

    def is_vector(self, number):
        return self.operand(number).startswith("{")

    def registers(self, number):
        """The registers in {...}, or the one."""
        return [each.strip() for each in self.operand(number).strip("{} \n\t").split(",")]

    def pair(self, number):
        """The two of `d|p`; without the second None."""
        first, _, second = self.operand(number).partition("|")
        return first.strip(), second.strip() or None

    def kind(self, text):
        """The type of a register in C++."""
        found = self.names.get(text.lstrip("!"))
        return found[1] if found else None

    def variable(self, text):
        """The program's own variable behind an operand, which is written late."""
        if not (found := self.names.get(text)) or not found[2]:
            raise Unknown(f"{text} has to be an operand of the asm that is read and written")
        self.names[text] = (*found[:3], True)
        return found[2]

    def literal(self, text, type_):
        text = text.strip()
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
            return f"__builtin_bit_cast(float, 0x{match[1]}u)"
        if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
            return f"__builtin_bit_cast(double, 0x{match[1]}ull)"
        if re.fullmatch(r"-?\d+\.\d*(?:[eE][+-]?\d+)?|-?\d+[eE][+-]?\d+", text):
            return text
        if match := re.fullmatch(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?", text):
            value = int(match[2], 0 if match[2][1:2].isalpha() else 10)
            return f"{match[1]}{value}{'ull' if value > 0x7FFFFFFF else ''}"
        return None

    def read(self, text, type_):
        """A register, a number or a special register, as a value of this type."""
        cxx = TYPES[type_]
        if type_ == "pred" and text.startswith("!"):
            return f"!{self.read(text[1:].strip(), type_)}"
        if found := self.names.get(text):
            return f"bool({found[0]})" if type_ == "pred" else f"ptx::as<{cxx}>({found[0]})"
        number = self.literal(text, type_)
        if number is not None:
            return number if type_ == "pred" else f"ptx::as<{cxx}>({cxx}({number}))" if "cast" not in number else (
                f"ptx::as<{cxx}>({number})")
        name = text.lstrip("%")
        if name in SPECIAL:
            return f"ptx::as<{cxx}>({SPECIAL[name]})"
        if name == "WARP_SZ":
            return "32"
        if text.startswith("@"):
            raise Unknown(f"there is no operand %{text[1:]}")
        raise Unknown(f"the CPU backend does not have the special register {text}" if text.startswith("%")
                      else f"{text} is not declared in this asm")

    def write(self, number, expression, type_=None):
        return self.put(self.operand(number), expression, type_)

    def put(self, text, expression, type_=None):
        """A statement that gives a register a value; of a type with a sign, it fills a larger register."""
        if text == "_":
            return f"(void)({expression}); "
        if not (found := self.names.get(text)):
            raise Unknown(f"{text} is not declared in this asm")
        if found[2] is False:
            raise Unknown(f"{self.code} writes {text}, which is an input of the asm")
        return f"{found[0]} = ptx::as<{found[1]}>({expression}); "

    def put_all(self, number, array, count):
        to = self.registers(number)
        if len(to) != count:
            raise Unknown(f"{self.code} needs {count} registers, not {len(to)}")
        return "".join(self.put(each, f"{array}[{k}]") for k, each in enumerate(to))

    def array(self, name, number, count=None):
        parts = self.registers(number)
        if count and len(parts) != count:
            raise Unknown(f"{self.code} needs {count} registers, not {len(parts)}")
        values = ", ".join(self.read(each, "u32") for each in parts)
        return f"const std::uint32_t {name}[] = {{{values}}}; "


# ---- A statement -----------------------------------------------------------------------------------

_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b(?:\s*\b(?:volatile|__volatile__|__volatile|inline)\b)*\s*\(")
_LABELS = re.compile(r"\s*(?:[A-Za-z_$%][\w$]*\s*:\s*)*")
_TOKEN = re.compile(r"\s+|[{};]|[^{};\s]+")


def _split(code, text, separator):
    """The pieces of `text` between separators outside of brackets and strings, which `code` has not."""
    pieces, depth, begin = [], 0, 0
    for position, character in enumerate(code):
        depth += (character in "([{") - (character in ")]}")
        if character == separator and depth == 0:
            pieces.append((code[begin:position], text[begin:position]))
            begin = position + 1
    return [*pieces, (code[begin:], text[begin:])]


def _string(text):
    """What string literals one after another say."""
    found = ""
    for literal in re.finditer(r'R"([^()\s\\]*)\((.*?)\)\1"|"((?:[^"\\]|\\.)*)"|(\S+)', text, re.DOTALL):
        if literal[4]:
            raise Unknown("the text of the asm is not a string")
        found += literal[2] if literal[2] is not None else ast.literal_eval('"' + literal[3].replace("\n", "\\n") + '"')
    return found


def _operands(section):
    """(constraint, expression) of each operand of a section."""
    code, text = section
    if not text.strip():
        return
    for each_code, each in _split(code, text, ","):
        match = re.fullmatch(r'\s*(?:\[\s*(\w+)\s*\])?\s*"([^"]*)"\s*\((.*)\)\s*', each, re.DOTALL)
        if not match:
            raise Unknown("this operand of an asm is not understood: " + " ".join(each.split()))
        yield match[1], match[2], " ".join(match[3].split())


class Statement:
    """An asm statement: its text in C++."""

    def __init__(self, code, text):
        sections = _split(code, text, ":")
        if len(sections) > 4:
            raise Unknown("asm goto")
        self.names, self.before = {}, []
        self.parameters, self.arguments = ["const cuda_cpu::Site cuda_cpu_site"], ["cuda_cpu::Site::here()"]
        template = _string(sections[0][1])
        number = 0
        for kind, section in enumerate(sections[1:3]):
            for name, constraint, expression in _operands(section):
                self._operand(number, constraint, expression, kind == 0)
                if name:
                    template = template.replace(f"%[{name}]", f"%{number}")
                number += 1
        self.depth = 0
        self.body = self._block(template)

    def _operand(self, number, constraint, expression, is_output):
        name, letter = f"cuda_cpu_{number}", constraint.lstrip("=+&")
        key = f"@{number}"
        if letter in ("n", "i"):
            self._pass(f"const std::int64_t {name}", f"cuda_cpu::ptx::as<std::int64_t>({expression})")
            self.names[key] = (name, "std::int64_t", False)
            return
        if letter == "C":
            raise Unknown('an operand "C", a string')
        if letter not in CONSTRAINTS:
            raise OfTheHost
        type_ = REGISTERS[CONSTRAINTS[letter]]
        if not is_output:
            self._pass(f"const {type_} {name}", f"cuda_cpu::ptx::as<{type_}>({expression})")
            self.names[key] = (name, type_, False)
            return
        own = f"cuda_cpu_own_{number}"
        read = f" = cuda_cpu::ptx::as<{type_}>({own})" if constraint.startswith("+") else ""
        self._pass(f"auto& {own}", expression)
        self.before.append((key, f"{type_} {name}{read};",
                            f"{own} = cuda_cpu::ptx::as<std::remove_reference_t<decltype({own})>>({name});"))
        self.names[key] = (name, type_, own if constraint.startswith("+") else None)

    def _pass(self, parameter, expression):
        """The program's expressions stand outside of the lambda: it could not capture all that they may name."""
        self.parameters.append(parameter)
        self.arguments.append(expression)

    def _block(self, template):
        template = re.sub(r"//[^\n]*|/\*.*?\*/", " ", template, flags=re.DOTALL)
        template = re.sub(r"%(\d+)", r"@\1", template).replace("%%", "%")
        scopes, out, statement, vectors = [{}], [], "", 0
        for token in _TOKEN.findall(template):
            if token in "{}" and _LABELS.fullmatch(statement):
                out.append(self._statement(statement.strip(), scopes))
                statement = ""
                if token == "{":
                    scopes.append({})
                elif len(scopes) > 1:
                    scopes.pop()
                else:
                    raise Unknown("a } in an asm without its {")
                out.append(token)
            elif token == ";":
                out.append(self._statement(statement.strip(), scopes))
                statement = ""
            else:
                statement += token
        if statement.strip():
            out.append(self._statement(statement.strip(), scopes))
        if len(scopes) > 1:
            raise Unknown("a { in an asm without its }")
        return " ".join(out)

    def _statement(self, text, scopes):
        labels = ""
        while match := re.match(r"([A-Za-z_$%][\w$]*)\s*:(?!:)\s*", text):
            labels += f"{_label(match[1])}: "
            text = text[match.end() :]
        if not text:
            return labels and labels + ";"
        if text.startswith("."):
            return labels + self._declare(text, scopes[-1])
        guard = ""
        if match := re.match(r"@(?!\d)\s*(!?)\s*([\w$%]+)\s+|@\s*(!?)\s*(@\d+)\s+", text):
            names = self._visible(scopes)
            name = match[2] or match[4]
            if name not in names:
                raise Unknown(f"{name} is not declared in this asm")
            guard = f"if ({match[1] or match[3] or ''}{names[name][0]}) "
            text = text[match.end() :]
        code, rest = re.match(r"(\S+)\s*(.*)", text, re.DOTALL).groups()
        operands = [each.strip() for each, _ in _split(rest, rest, ",")] if rest.strip() else []
        operands = [" ".join(each.split()) for each in operands]
        if re.fullmatch(r"bra(?:\.uni)?", code) and len(operands) == 1:
            return f"{labels}{guard}goto {_label(operands[0])};"
        if code in ("ret", "exit", "ret.uni"):
            raise Unknown(f"the CPU backend does not have the instruction {code}")
        names = self._visible(scopes)
        instruction = Instruction(code, operands, names)
        done = instruction.translated()
        for key, value in names.items():  # what variable() has marked
            if len(value) > 3:
                self.names[key] = value
        return f"{labels}{guard}{{ {done} }}"

    def _visible(self, scopes):
        names = dict(self.names)
        for scope in scopes:
            names |= scope
        return names

    def _declare(self, text, scope):
        match = re.fullmatch(r"\.reg\s*\.(\w+)\s+(.*)", text, re.DOTALL)
        if not match or match[1] not in TYPES:
            raise Unknown(f"the CPU backend does not have {text.split()[0]} in an asm")
        type_ = TYPES[match[1]] if match[1] == "pred" else REGISTERS[Instruction.bits(match[1])]
        out = []
        for each in match[2].split(","):
            name, count = re.fullmatch(r"\s*([\w$%]+)\s*(?:<(\d+)>)?\s*", each).groups()
            for one in [name] if not count else [f"{name}{k}" for k in range(int(count))]:
                scope[one] = (f"cuda_cpu_r_{re.sub(r'[^A-Za-z0-9_]', '_', one)}", type_, None)
                out.append(f"{type_} {scope[one][0]};")
        return " ".join(out)

    def cxx(self):
        before, after = [], []
        for key, copy, back in self.before:
            if len(self.names[key]) == 3:  # it is not written late
                before.append(copy)
                after.append(back)
        return (f"[]({', '.join(self.parameters)}) __attribute__((always_inline)) {{ {' '.join(before)} "
                f"{{ namespace ptx = cuda_cpu::ptx; {self.body} }} {' '.join(after)} }}({', '.join(self.arguments)})")


def _label(name):
    return f"cuda_cpu_l_{re.sub(r'[^A-Za-z0-9_]', '_', name)}"


_LINE = re.compile(r'^#(?:line)? (\d+) "((?:[^"\\]|\\.)*)"([ \d]*)$', re.MULTILINE)


def has_asm(text):
    return re.search(r"\b(?:asm|__asm__|__asm)\b", code_of(text)) is not None


def translate_preprocessed(text, own, late=frozenset()):
    """The preprocessed `text` with the asm statements translated that stand in one of the files `own`. What cannot be
    is a TranslationError with file and line; in the files `late` it is one only when a kernel comes to it, for a
    library has much that a program does not use."""
    code = code_of(text)
    places = [(match.end(), int(match[1]), match[2], "3" in match[3].split()) for match in _LINE.finditer(text)]
    out, end, place = [], 0, 0
    for match in _ASM.finditer(code):
        while place < len(places) and places[place][0] <= match.start():
            place += 1
        if place == 0 or places[place - 1][2] not in own or match.start() < end:
            continue
        at, line, file, _ = places[place - 1]
        close = _closing(code, match.end() - 1)
        try:
            new = Statement(code[match.end() : close], text[match.end() : close]).cxx()
        except OfTheHost:
            continue
        except Unknown as problem:
            number = line + text.count("\n", at, match.start()) - 1
            said = f"{file}:{number}: " + re.sub(r"@(?=\d)", "%", str(problem))
            if file not in late:
                raise TranslationError(said) from None
            new = f'cuda_cpu::fail("%s", {json.dumps(said)})'
        out += [text[end : match.start()], new, "\n" * text.count("\n", match.start(), close + 1)]
        end = close + 1
    return "".join(out) + text[end:]
