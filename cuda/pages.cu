// Pages between an engine's paged KV and page-major slots.
//
// A sheet is a set of planes of one geometry: one layer's K, its V, or a fused latent. An engine block of a plane is
// `heads` x `tokens` rows of `row` bytes, at any strides; in a slot the rows of a head lie one after the other. A page
// is `per` engine blocks. Both sides may be device memory or pinned host memory.
//
// No includes, so that NVRTC needs no headers. Every argument is 8 bytes wide, so that none can be passed too narrow.

typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int u32;

struct __align__(32) Plane {
  u64 base;  // address of the plane's block 0
  u64 at;    // offset of its rows in a slot
  u64 meta;  // offset of its scales in a slot, for quant.cu
};

// A row vector of the block, found by steps instead of divisions.
struct Place {
  u32 vec, token, head;

  __device__ void start(u32 n, u32 vecs, u32 tokens) {
    vec = n % vecs;
    token = n / vecs % tokens;
    head = n / vecs / tokens;
  }

  __device__ void step(const Place& by, u32 vecs, u32 tokens) {
    vec += by.vec;
    token += by.token;
    head += by.head;
    if (vec >= vecs) vec -= vecs, token++;
    if (token >= tokens) token -= tokens, head++;
  }
};

// Block y of a grid row takes every gridDim.y-th part of a (engine block, plane), so that few large blocks fill the GPU too.
// Rows of threads (blockDim.y) take one engine block each, so that small ones fill a warp and share sectors of the tables.
// IN: from the engine into slots.
template <typename V, bool IN>
__device__ void move(const Plane* planes, u64 plane_count, const u64* slots, const i64* ids, u64 blocks, u64 per,
                     i64 block_stride, u64 heads, i64 head_stride, u64 head_pitch, u64 tokens, i64 token_stride,
                     u64 row) {
  const u32 vecs = row / sizeof(V), total = vecs * (u32)tokens * (u32)heads, stride = blockDim.x * gridDim.y;
  Place first, by;
  first.start(blockIdx.y * blockDim.x + threadIdx.x, vecs, tokens);
  by.start(stride, vecs, tokens);
  const u32 units = ((u32)blocks + blockDim.y - 1) / blockDim.y * (u32)plane_count;
  for (u32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const u32 block = unit / (u32)plane_count * blockDim.y + threadIdx.y, page = block / (u32)per;
    if (block >= (u32)blocks) continue;
    const ulonglong2 plane = __ldg((const ulonglong2*)(planes + unit % (u32)plane_count));  // base, at
    const u64 engine = plane.x + ids[block] * block_stride;
    const u64 slot = slots[page] + plane.y + (block - page * (u32)per) * tokens * row;
    Place place = first;
    for (u32 n = blockIdx.y * blockDim.x + threadIdx.x; n < total; n += 4 * stride) {
      V held[4];
      u64 to[4];
#pragma unroll
      for (u32 k = 0; k < 4; k++) {
        const u64 theirs = engine + place.head * head_stride + place.token * token_stride + place.vec * sizeof(V);
        const u64 ours = slot + place.head * head_pitch + place.token * row + place.vec * sizeof(V);
        to[k] = IN ? ours : theirs;
        if (n + k * stride < total) held[k] = __ldcs((const V*)(IN ? theirs : ours));
        place.step(by, vecs, tokens);
      }
#pragma unroll
      for (u32 k = 0; k < 4; k++)
        if (n + k * stride < total) __stcs((V*)to[k], held[k]);
    }
  }
}

#define MOVE(name, V, IN)                                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                                 \
      name(const Plane* planes, u64 plane_count, const u64* slots, const i64* ids, u64 blocks, u64 per,             \
           i64 block_stride, u64 heads, i64 head_stride, u64 head_pitch, u64 tokens, i64 token_stride, u64 row) {   \
    move<V, IN>(planes, plane_count, slots, ids, blocks, per, block_stride, heads, head_stride, head_pitch, tokens, \
                token_stride, row);                                                                                 \
  }

MOVE(gather_16, uint4, true)
MOVE(gather_8, uint2, true)
MOVE(gather_4, u32, true)
MOVE(gather_2, unsigned short, true)
MOVE(gather_1, unsigned char, true)
MOVE(scatter_16, uint4, false)
MOVE(scatter_8, uint2, false)
MOVE(scatter_4, u32, false)
MOVE(scatter_2, unsigned short, false)
MOVE(scatter_1, unsigned char, false)
