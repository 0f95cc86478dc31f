// Gather with quantization and scatter with dequantization, bf16 or fp16 against fp8 e4m3, int8 and int4.
//
// A sheet is a set of planes of one geometry as in pages.cu. In a slot a plane has the codes of its heads (a head's rows
// one after the other) at `at`, and one 4-byte scale per group of values at `meta`. A group is
//   token:   one row (one token of one head);
//   channel: one channel over 32 tokens of a page (the last group of a page may be shorter), as KIVI does with keys.
// fp8 has a float32 scale. int8 and int4 have two numbers of the element's type: the least value, exact, and the step,
// rounded up. A group with a value that is not finite has the scale NaN, which brings NaN back. Subnormal float32 count
// as 0, so that the result does not depend on the compiler's -ftz.
//
// Rows are `8 * vecs` elements at 16-byte boundaries. Every argument is 8 bytes wide. kvtier/quant.py is the same in
// numpy, bit for bit.

typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int u32;

struct __align__(32) Plane {
  u64 base;  // address of the plane's block 0
  u64 at;    // offset of its codes in a slot
  u64 meta;  // offset of its scales in a slot
};

#define GROUP 32u   // tokens of a channel's group
#define INF __int_as_float(0x7F800000)
#define TINY 1e-30f  // a scale below it is 0

__device__ float settled(float x) { return fabsf(x) < 1.17549435e-38f ? 0.0f : x; }

struct Bf16 {
  static __device__ float largest() { return 0x1.FEp127f; }
  static __device__ float low(u32 pair) { return __uint_as_float(pair << 16); }
  static __device__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
  static __device__ u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  static __device__ u32 up(float x) { return (__float_as_uint(x) + 0xFFFFu) >> 16; }  // x >= 0
};

struct Fp16 {
  static __device__ float largest() { return 65504.0f; }
  static __device__ float wide(unsigned short half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
  }
  static __device__ float low(u32 pair) { return wide((unsigned short)pair); }
  static __device__ float high(u32 pair) { return wide((unsigned short)(pair >> 16)); }
  static __device__ u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  static __device__ u32 up(float x) {  // x >= 0
    const u32 near = pack(x, 0.0f);
    return low(near) < x ? near + 1 : near;
  }
};

// What a group's values say about its scale.
struct Range {
  float least, most;

  __device__ Range() : least(INF), most(-INF) {}

  __device__ void add(float x) {
    x = fabsf(x) < INF ? settled(x) : INF;
    least = fminf(least, x);
    most = fmaxf(most, x);
  }

  __device__ void merge(u32 by) {
    least = fminf(least, __shfl_xor_sync(0xFFFFFFFFu, least, by));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, by));
  }
};

// A scale as it is used: code = (x - least) * inverse, x = code * step + least. Whole codes are computed of halves, whose
// difference is finite for all finite values (bf16 goes nearly as far as float32), and halving rounds nothing; nor does
// the product of code and step, so that one rounding at its end changes nothing but what would be infinite before.
struct Scale {
  float least, step, inverse;
  u32 meta;
};

template <typename E, u32 TOP>
struct Whole {  // codes 0..TOP
  static __device__ Scale scale(const Range& range) {
    Scale s = {0.0f, 0.0f, 0.0f, 0x7FFF7FFFu};
    const float half = __fsub_rn(__fmul_rn(range.most, 0.5f), __fmul_rn(range.least, 0.5f));
    if (!(half < INF)) return s;
    s.least = range.least;
    s.meta = E::pack(s.least, 0.0f);
    const float step = __fmul_rn(half, TOP == 255 ? 0x1.010102p-7f : 0x1.111112p-3f);
    if (step < TINY) return s;
    const u32 up = E::up(step);
    s.step = E::low(up);
    s.inverse = __fmul_rn(__frcp_rn(s.step), 2.0f);
    s.meta |= up << 16;
    return s;
  }

  static __device__ Scale known(u32 meta) { return {E::low(meta), E::high(meta), 0.0f, meta}; }

  static __device__ u32 code(float x, const Scale& s) {
    const float at = __fmul_rn(__fsub_rn(__fmul_rn(settled(x), 0.5f), __fmul_rn(s.least, 0.5f)), s.inverse);
    return s.inverse == 0.0f ? 0 : min(__float2uint_rn(at), TOP);
  }

  static __device__ u32 pair(float low, float high, const Scale& a, const Scale& b) {
    return code(low, a) | code(high, b) * (TOP + 1);
  }

  static __device__ float value(u32 code, const Scale& s) {
    const float x = __fmaf_rn(__uint2float_rn(code & TOP), s.step, s.least);
    return x > E::largest() ? E::largest() : x;  // the step was rounded up; NaN stays
  }

  static __device__ void values(u32 codes, float* x, const Scale& a, const Scale& b) {
    x[0] = value(codes, a);
    x[1] = value(codes / (TOP + 1), b);
  }
};

template <typename E>
struct Int8 : Whole<E, 255> {
  static const u32 bits = 8;
};

template <typename E>
struct Int4 : Whole<E, 15> {
  static const u32 bits = 4;
};

template <typename E>
struct Fp8 {
  static const u32 bits = 8;

  static __device__ Scale scale(const Range& range) {
    Scale s = {0.0f, 0.0f, 0.0f, 0x7FC00000u};
    const float most = fmaxf(fabsf(range.least), fabsf(range.most));
    if (!(most < INF)) return s;
    const float step = __fmul_rn(most, 0x1.24924ap-9f);  // 1/448, rounded up
    s.meta = 0;
    if (step < TINY) return s;
    s.step = step;
    s.inverse = __frcp_rn(step);
    s.meta = __float_as_uint(step);
    return s;
  }

  static __device__ Scale known(u32 meta) { return {0.0f, __uint_as_float(meta), 0.0f, meta}; }

#if __CUDA_ARCH__ >= 890
  static __device__ u32 codes_of(float low, float high) {
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
  }

  static __device__ void widen(u32 codes, float* x) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)codes));
    x[0] = Fp16::low(halves);
    x[1] = Fp16::high(halves);
  }
#else
  static __device__ u32 code(float x) {
    const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, size = bits & 0x7FFFFFFFu;
    if (size < 0x3C800000u) return sign | __float2uint_rn(__fmul_rn(__uint_as_float(size), 512.0f));  // below 2^-6
    const u32 rounded = (size + 0x7FFFFu + (size >> 20 & 1u)) >> 20;  // three bits of mantissa, ties to even
    return sign | min(rounded - (120u << 3), 0x7Eu);
  }

  static __device__ u32 codes_of(float low, float high) { return code(low) | code(high) << 8; }

  static __device__ float wide(u32 code) {
    const u32 sign = (code & 0x80u) << 24, size = code & 0x7Fu;
    const float small = __fmul_rn(__uint2float_rn(size), 0.001953125f);
    return __uint_as_float(sign | (size < 8 ? __float_as_uint(small) : (size << 20) + (120u << 23)));
  }

  static __device__ void widen(u32 codes, float* x) {
    x[0] = wide(codes);
    x[1] = wide(codes >> 8);
  }
#endif

  static __device__ float scaled(float x, const Scale& s) {
    return s.inverse == 0.0f ? 0.0f : __fmul_rn(settled(x), s.inverse);
  }

  static __device__ u32 pair(float low, float high, const Scale& a, const Scale& b) {
    return codes_of(scaled(low, a), scaled(high, b));
  }

  static __device__ void values(u32 codes, float* x, const Scale& a, const Scale& b) {
    widen(codes, x);
    x[0] = __fmul_rn(x[0], a.step);
    x[1] = __fmul_rn(x[1], b.step);
  }
};

// Eight values and their codes; STEP is 0 where one scale holds for all eight and 1 where each has its own.
template <typename E, typename C, u32 STEP>
__device__ void encode(u64 to, const uint4& from, const Scale* scales) {
  const u32 pairs[4] = {from.x, from.y, from.z, from.w};
  u32 codes[4];
#pragma unroll
  for (u32 k = 0; k < 4; k++)
    codes[k] = C::pair(E::low(pairs[k]), E::high(pairs[k]), scales[2 * k * STEP], scales[(2 * k + 1) * STEP]);
  if (C::bits == 8)
    __stcs((uint2*)to, make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16));
  else
    __stcs((u32*)to, codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24);
}

// The codes of eight values.
template <typename C>
__device__ uint2 fetch(u64 from) {
  if (C::bits == 8) return __ldcs((const uint2*)from);
  return make_uint2(__ldcs((const u32*)from), 0);
}

template <typename E, typename C, u32 STEP>
__device__ void decode(u64 to, uint2 words, const Scale* scales) {
  u32 pairs[4];
#pragma unroll
  for (u32 k = 0; k < 4; k++) {
    const u32 word = C::bits == 8 && k >= 2 ? words.y : words.x;
    float x[2];
    C::values(word >> (2 * C::bits * (C::bits == 8 ? k % 2 : k)), x, scales[2 * k * STEP], scales[(2 * k + 1) * STEP]);
    pairs[k] = E::pack(x[0], x[1]);
  }
  __stcs((uint4*)to, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
}

template <typename E>
__device__ void extend(Range* ranges, u32 step, const uint4& from) {
  const u32 pairs[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (u32 k = 0; k < 4; k++) {
    ranges[2 * k * step].add(E::low(pairs[k]));
    ranges[(2 * k + 1) * step].add(E::high(pairs[k]));
  }
}

// One head of one plane of one page: where its rows lie on both sides.
struct Head {
  const i64* ids;
  u64 engine, codes, meta;
  i64 block_stride, token_stride;
  u32 tokens, row;

  __device__ Head(const Plane* planes, u32 plane_count, const u64* slots, const i64* ids, u32 per, i64 block_stride,
                  u32 heads, i64 head_stride, u64 head_pitch, u32 tokens, i64 token_stride, u32 row, u32 n)
      : block_stride(block_stride), token_stride(token_stride), tokens(tokens), row(row) {
    const u32 head = n % heads, page = n / heads / plane_count;
    const Plane plane = planes[n / heads % plane_count];
    this->ids = ids + (u64)page * per;
    engine = plane.base + head * head_stride;
    codes = slots[page] + plane.at + head * head_pitch;
    meta = slots[page] + plane.meta + head * head_pitch;
  }

  __device__ u64 ours(u32 token) const { return codes + (u64)token * row; }
};

// The engine's rows of consecutive tokens of a head; looks up a block when it comes to it.
struct Walk {
  const Head& head;
  u32 block, within;
  u64 base;

  __device__ Walk(const Head& head, u32 token) : head(head), block(token / head.tokens), within(token % head.tokens) {
    base = head.engine + head.ids[block] * head.block_stride;
  }

  __device__ u64 next() {
    if (within == head.tokens) {
      within = 0;
      base = head.engine + head.ids[++block] * head.block_stride;
    }
    return base + within++ * head.token_stride;
  }
};

#define ARGUMENTS                                                                                                 \
  const Plane *planes, u64 plane_count, const u64 *slots, const i64 *ids, u64 pages, u64 per, i64 block_stride,   \
      u64 heads, i64 head_stride, u64 head_pitch, u64 tokens, i64 token_stride, u64 vecs, u64 lanes
#define HEAD(n)                                                                                                \
  Head(planes, plane_count, slots, ids, per, block_stride, heads, head_stride, head_pitch, tokens, token_stride, \
       (u32)vecs * C::bits, n)

// `lanes` (a power of two up to 32) threads take ROWS consecutive tokens of a head, each up to VECS vectors of a row.
#define TOKENS                                                                                              \
  const u32 in_page = per * tokens, each = blockDim.x / (u32)lanes, lane = threadIdx.x % (u32)lanes;        \
  const u32 total = (u32)pages * plane_count * heads * (in_page / ROWS);                                    \
  for (u32 at = blockIdx.x * each; at < total; at += gridDim.x * each) {                                    \
    const u32 n = at + threadIdx.x / (u32)lanes, mine = n < total ? n : total - 1;                          \
    const u32 first = mine % (in_page / ROWS) * ROWS, live = n < total ? (u32)vecs : 0;                     \
    const Head head = HEAD(mine / (in_page / ROWS));                                                        \
    Walk walk(head, first);                                                                                 \
    uint4* const metas = (uint4*)((u32*)head.meta + first);

template <typename E, typename C, u32 ROWS, u32 VECS>
__device__ void pack_token(ARGUMENTS) {
  TOKENS
    uint4 held[ROWS][VECS];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
      const u64 from = walk.next();
#pragma unroll
      for (u32 k = 0; k < VECS; k++)
        if (lane + k * lanes < live) held[r][k] = __ldcs((const uint4*)from + lane + k * lanes);
    }
    u32 words[ROWS];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
      Range range;
#pragma unroll
      for (u32 k = 0; k < VECS; k++)
        if (lane + k * lanes < live) extend<E>(&range, 0, held[r][k]);
      for (u32 by = 1; by < lanes; by *= 2) range.merge(by);
      const Scale scale = C::scale(range);
      words[r] = scale.meta;
#pragma unroll
      for (u32 k = 0; k < VECS; k++)
        if (lane + k * lanes < live)
          encode<E, C, 0>(head.ours(first + r) + (lane + k * lanes) * C::bits, held[r][k], &scale);
    }
#pragma unroll
    for (u32 r = 0; r < ROWS; r += 4)
      if (lane == 0 && live) __stcs(metas + r / 4, make_uint4(words[r], words[r + 1], words[r + 2], words[r + 3]));
  }
}

template <typename E, typename C, u32 ROWS, u32 VECS>
__device__ void unpack_token(ARGUMENTS) {
  TOKENS
    uint2 held[ROWS][VECS];
    u32 words[ROWS];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++)
#pragma unroll
      for (u32 k = 0; k < VECS; k++)
        if (lane + k * lanes < live) held[r][k] = fetch<C>(head.ours(first + r) + (lane + k * lanes) * C::bits);
#pragma unroll
    for (u32 r = 0; r < ROWS; r += 4) {
      const uint4 four = __ldcs(metas + r / 4);
      words[r] = four.x, words[r + 1] = four.y, words[r + 2] = four.z, words[r + 3] = four.w;
    }
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
      const Scale scale = C::known(words[r]);
      const u64 to = walk.next();
#pragma unroll
      for (u32 k = 0; k < VECS; k++)
        if (lane + k * lanes < live) decode<E, C, 0>(to + 16 * (lane + k * lanes), held[r][k], &scale);
    }
  }
}

// A thread takes eight channels over a group's tokens. The scales of a group lie as [2][vecs][4]: a warp's stores of
// them are one run.
#define CHANNELS                                                                                            \
  const u32 in_page = per * tokens, groups = (in_page + GROUP - 1) / GROUP;                                 \
  const u32 total = (u32)pages * plane_count * heads * groups * vecs;                                       \
  for (u32 n = blockIdx.x * blockDim.x + threadIdx.x; n < total; n += gridDim.x * blockDim.x) {             \
    const u32 vec = n % (u32)vecs, group = n / (u32)vecs % groups, first = group * GROUP;                   \
    const u32 count = in_page - first < GROUP ? in_page - first : GROUP;                                    \
    const Head head = HEAD(n / (u32)vecs / groups);                                                         \
    Walk walk(head, first);                                                                                 \
    uint4* const metas = (uint4*)head.meta + group * 2 * (u32)vecs + vec;

template <typename E, typename C>
__device__ void pack_channel(ARGUMENTS) {
  CHANNELS
    uint4 held[GROUP];
    Range ranges[8];
#pragma unroll
    for (u32 t = 0; t < GROUP; t++)
      if (t < count) held[t] = __ldcs((const uint4*)walk.next() + vec);
#pragma unroll
    for (u32 t = 0; t < GROUP; t++)
      if (t < count) extend<E>(ranges, 1, held[t]);
    Scale s[8];
#pragma unroll
    for (u32 k = 0; k < 8; k++) s[k] = C::scale(ranges[k]);
    __stcs(metas, make_uint4(s[0].meta, s[1].meta, s[2].meta, s[3].meta));
    __stcs(metas + vecs, make_uint4(s[4].meta, s[5].meta, s[6].meta, s[7].meta));
#pragma unroll
    for (u32 t = 0; t < GROUP; t++)
      if (t < count) encode<E, C, 1>(head.ours(first + t) + vec * C::bits, held[t], s);
  }
}

template <typename E, typename C>
__device__ void unpack_channel(ARGUMENTS) {
  CHANNELS
    const uint4 a = __ldcs(metas), b = __ldcs(metas + vecs);
    const Scale s[8] = {C::known(a.x), C::known(a.y), C::known(a.z), C::known(a.w),
                        C::known(b.x), C::known(b.y), C::known(b.z), C::known(b.w)};
    for (u32 t = 0; t < count; t += 8) {  // groups are of 16 or 32 tokens
      uint2 held[8];
#pragma unroll
      for (u32 k = 0; k < 8; k++) held[k] = fetch<C>(head.ours(first + t + k) + vec * C::bits);
#pragma unroll
      for (u32 k = 0; k < 8; k++) decode<E, C, 1>(walk.next() + 16 * vec, held[k], s);
    }
  }
}

// One pair of element and codec a compilation: -DELEMENT=Bf16|Fp16 -DCODEC=Fp8|Int8|Int4. Rows of up to 32 vectors go to
// run_pack_token, longer ones (up to 128 vectors) to run_pack_token_wide.
#define KERNEL(name, ...)                                                                                            \
  extern "C" __global__ void __launch_bounds__(128, 2) run_##name(ARGUMENTS) {                                          \
    __VA_ARGS__(planes, plane_count, slots, ids, pages, per, block_stride, heads, head_stride, head_pitch, tokens, \
                token_stride, vecs, lanes);                                                                          \
  }

KERNEL(pack_token, pack_token<ELEMENT, CODEC<ELEMENT>, 8, 1>)
KERNEL(unpack_token, unpack_token<ELEMENT, CODEC<ELEMENT>, 8, 1>)
KERNEL(pack_token_wide, pack_token<ELEMENT, CODEC<ELEMENT>, 4, 4>)
KERNEL(unpack_token_wide, unpack_token<ELEMENT, CODEC<ELEMENT>, 4, 4>)
KERNEL(pack_channel, pack_channel<ELEMENT, CODEC<ELEMENT>>)
KERNEL(unpack_channel, unpack_channel<ELEMENT, CODEC<ELEMENT>>)
