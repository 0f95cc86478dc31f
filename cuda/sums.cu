// xxh3-64 of slots, equal to the host's, for sizes over 240 bytes in multiples of 8.
//
// What a block of 1024 bytes adds to the eight accumulators does not depend on them: 256 threads add up 32 blocks at
// once while the last warp walks the short chain through the 32 before.
//
// `keys` are words of the algorithm's secret: [0, 24) at 8n, [24, 32) at 121 + 8n, [32, 40) at 11 + 8n; [40, 48) are
// what the accumulators begin with.

typedef unsigned long long u64;
typedef unsigned int u32;

#define BATCH 32u  // blocks that are added up at once, by 8 threads each
#define WARP 0xFFFFFFFFu

// What one word of data adds to its accumulator.
__device__ u64 product(u64 data, u64 key) {
  const u64 mixed = data ^ key;
  return (mixed & 0xFFFFFFFFull) * (mixed >> 32);
}

// What up to MOST stripes of 64 bytes add to accumulator `lane`; a word also goes to its neighbour. By whole warps.
template <u32 MOST>
__device__ u64 stripes(const u64* at, u32 count, u32 lane, const u64* keys) {
  u64 own = 0, crossing = 0;
  if (count >= MOST) {
#pragma unroll
    for (u32 s = 0; s < MOST; s++) {
      const u64 data = __ldcs(at + 8 * s + lane);
      crossing += data;
      own += product(data, keys[s + lane]);
    }
  } else {
    for (u32 s = 0; s < count; s++) {
      const u64 data = __ldcs(at + 8 * s + lane);
      crossing += data;
      own += product(data, keys[s + lane]);
    }
  }
  return own + __shfl_xor_sync(WARP, crossing, 1);
}

// The eight accumulators folded into one word; each of eight lanes brings one.
__device__ u64 folded(u64 acc, u32 lane, u64 bytes, const u64* keys) {
  const u64 mine = acc ^ keys[32 + lane], other = __shfl_xor_sync(WARP, mine, 1);
  u64 sum = (mine * other) ^ __umul64hi(mine, other);
  sum += __shfl_xor_sync(WARP, sum, 2);
  sum += __shfl_xor_sync(WARP, sum, 4);
  sum += bytes * 0x9E3779B185EBCA87ull;
  sum = (sum ^ (sum >> 37)) * 0x165667919E3779F9ull;
  return sum ^ (sum >> 32);
}

extern "C" __global__ void __launch_bounds__(8 * BATCH + 32)
    sum_slots(const u64* slots, u64 count, u64 bytes, const u64* keys, u64* out) {
  __shared__ u64 sums[2][BATCH][8];
  const u32 lane = threadIdx.x % 8, mine = threadIdx.x / 8;
  const bool chains = mine >= BATCH;
  const u32 full = (bytes - 1) / 1024, batches = (full + BATCH - 1) / BATCH;
  for (u64 n = blockIdx.x; n < count; n += gridDim.x) {
    const u64* slot = (const u64*)slots[n];
    u64 acc = keys[40 + lane];
    for (u32 batch = 0; batch <= batches; batch++) {
      if (!chains) {
        const u32 block = batch * BATCH + mine;
        const u64 sum = stripes<16>(slot + 128 * (u64)block, block < full ? 16 : 0, lane, keys);
        sums[batch % 2][mine][lane] = sum;
      } else if (batch > 0) {
        const u32 before = (batch - 1) * BATCH, last = full - before < BATCH ? full - before : BATCH;
        for (u32 k = 0; k < last; k++) {
          acc += sums[(batch - 1) % 2][k][lane];
          acc = (acc ^ (acc >> 47) ^ keys[16 + lane]) * 0x9E3779B1ull;
        }
      }
      __syncthreads();
    }
    if (chains) {
      acc += stripes<16>(slot + 128 * (u64)full, (bytes - 1) % 1024 / 64, lane, keys);
      acc += stripes<1>(slot + (bytes - 64) / 8, 1, lane, keys + 24);
      const u64 sum = folded(acc, lane, bytes, keys);
      if (threadIdx.x == 8 * BATCH) out[n] = sum;
    }
  }
}
