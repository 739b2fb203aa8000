"""Vector instructions in LLVM's terms, for the kernels that write their machine code themselves."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from onnxgrad.cpu.core.levels import has_feature

HAS_AVX512, HAS_NEON = has_feature("avx512f"), has_feature("neon")
HAS_BF16_PRODUCTS = HAS_AVX512 and has_feature("avx512bf16")
VECTOR_BYTES = 64 if HAS_AVX512 else 32 if has_feature("avx") else 16
BIT, INT8, INT32, INT64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
FIRST_LEVEL, SECOND_LEVEL = 3, 2  # caches that a prefetch fills


def data_of(context: Any, builder: ir.IRBuilder, kind: Any, array: Any) -> Any:
    """A pointer to the elements of a Numba array."""
    return context.make_array(kind)(context, builder, array).data


class Vectors:
    """Writes the instructions, for vectors of float32 or float64 numbers of `size` bytes."""

    def __init__(self, builder: ir.IRBuilder, size: int, lanes: int | None = None) -> None:
        self.builder, self.size, self.lanes = builder, size, lanes or VECTOR_BYTES // size
        self.type = ir.VectorType(ir.FloatType() if size == 4 else ir.DoubleType(), self.lanes)
        self.mask_type = ir.VectorType(BIT, self.lanes)
        self.zeros = ir.Constant(self.type, None)
        self._name = f"v{self.lanes}f{8 * size}"

    def intrinsic(self, result: Any, name: str, *arguments: Any) -> Any:
        """Calls a function of LLVM."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def at(self, base: Any, offset: Any, kind: Any = None) -> Any:
        """A pointer to a vector, of this type or another; the offset counts what `base` points to."""
        return self.builder.bitcast(
            self.builder.gep(base, [offset]), (self.type if kind is None else kind).as_pointer()
        )

    def load(self, place: Any) -> Any:
        return self.builder.load(place, align=self.size)

    def store(self, vector: Any, place: Any) -> None:
        self.builder.store(vector, place, align=self.size)

    def masked_load(self, place: Any, mask: Any) -> Any:
        """Lanes that the mask leaves out are not read, and 0."""
        name = f"llvm.masked.load.{self._name}.p0{self._name}"
        return self.intrinsic(self.type, name, place, INT32(self.size), mask, self.zeros)

    def masked_store(self, vector: Any, place: Any, mask: Any) -> None:
        name = f"llvm.masked.store.{self._name}.p0{self._name}"
        self.intrinsic(ir.VoidType(), name, vector, place, INT32(self.size), mask)

    def prefetch(self, base: Any, offset: Any, cache: int) -> None:
        """Has the processor bring a cache line in; any address will do."""
        place = self.at(base, offset, INT8)
        self.intrinsic(ir.VoidType(), "llvm.prefetch.p0i8", place, INT32(0), INT32(cache), INT32(1))  # to read, data

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a · b + c, rounded once."""
        return self.intrinsic(self.type, f"llvm.fma.{self._name}", a, b, c)

    def fma_of_pairs(self, a: Any, b: Any, c: Any) -> Any:
        """a₀ · b₀ + a₁ · b₁ + c, of lanes of two bfloat16 numbers each; which sum comes first differs by processor."""
        builder, words = self.builder, ir.VectorType(INT32, self.lanes)
        pairs = [builder.bitcast(x, words) for x in (a, b)]
        if HAS_BF16_PRODUCTS:
            return self.intrinsic(self.type, "llvm.x86.avx512bf16.dpbf16ps.512", c, *pairs)
        shift, upper = (ir.Constant(words, [bits] * self.lanes) for bits in (16, 0xFFFF0000))
        a0, b0 = (builder.bitcast(builder.shl(x, shift), self.type) for x in pairs)
        a1, b1 = (builder.bitcast(builder.and_(x, upper), self.type) for x in pairs)
        return self.fma(a1, b1, self.fma(a0, b0, c))

    def splat(self, number: Any) -> Any:
        """The number in every lane."""
        undefined = ir.Constant(ir.VectorType(number.type, self.lanes), ir.Undefined)
        return self.shuffle(self.builder.insert_element(undefined, number, INT32(0)), undefined, [0] * self.lanes)

    def shuffle(self, first: Any, second: Any, order: list[int]) -> Any:
        return self.builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT32, self.lanes), order))

    def compare(self, how: str, number: Any, first: int = 0) -> Any:
        """A mask: lanes whose number, counted from `first`, is below the given one, or whatever `how` says."""
        lanes = ir.Constant(ir.VectorType(INT32, self.lanes), list(range(first, first + self.lanes)))
        return self.builder.icmp_signed(how, lanes, self.splat(self.builder.trunc(number, INT32)))

    def transpose(self, rows: list[Any]) -> list[Any]:
        """The columns of a square. Blocks off the diagonal change places: single elements, then pairs, …"""
        rows, lanes, half = list(rows), self.lanes, 1
        while half < lanes:
            low = [lane if lane & half == 0 else lanes + lane - half for lane in range(lanes)]
            high = [lane + half if lane & half == 0 else lanes + lane for lane in range(lanes)]
            for k in range(lanes):
                if k & half == 0:
                    pair = rows[k], rows[k + half]
                    rows[k], rows[k + half] = self.shuffle(*pair, low), self.shuffle(*pair, high)
            half *= 2
        return rows
