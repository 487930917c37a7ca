// Copies pages between the tensors of a KV cache group and a contiguous staging buffer.
//
// In the buffer GPU block i begins at i * block_bytes; its pages are contiguous, in the order of the
// group. A unit is up to 256 vectors of one page. Warps process units in a grid-stride loop; a warp
// loads a whole unit before it stores any of it. Each thread computes its addresses from the block
// id, the base of the page and its stride, so the host prepares nothing per page. The block ids are
// kernel parameters: a copy of them to the device would queue behind the copies of pages.
//
// pack and unpack do the same with pages of bfloat16 values, which are packed in the buffer. A unit is
// a tile of 1,024 values; proto/packing.py describes the format. The bytes to unpack may come from
// a damaged disk: whatever they are, nothing outside of the page is written, nor outside of the tile
// read.
//
// `make kernels` compiles this file to kernels.ptx, for GPUs from Turing on.

typedef unsigned long long u64;
typedef unsigned char u8;

constexpr unsigned LANES = 32, ALL = 0xffffffffu;

struct alignas(16) Vec16 { unsigned x, y, z, w; };

// One page of the group: address of row 0, stride of rows in bytes, bytes to copy, offset in a block.
struct Page { u64 base, stride, bytes, offset; };

// A chunk, without its block ids. pack sets the byte of a block in `unpackable` to 1 if it has a tile
// with too many escapes. There is a byte for each 1,024 bytes of the whole buffer, in host memory; the
// chunk begins `at` bytes after the buffer.
struct Chunk {
    char *stage; const Page *pages; u64 block_bytes; unsigned blocks, pages_per_block, units_per_page;
    u8 *unpackable; u64 at;
};

template <int N> struct Blocks { int ids[N]; };

template <typename V, bool SCATTER, int N>
__device__ __forceinline__ void move(const Chunk &chunk, const Blocks<N> &blocks) {
    constexpr unsigned LOADS = 8, UNIT = LOADS * LANES;
    const unsigned lane = threadIdx.x % LANES;
    const u64 warps = (u64)gridDim.x * (blockDim.x / LANES);
    const unsigned per_block = chunk.pages_per_block * chunk.units_per_page;
    const u64 units = (u64)per_block * chunk.blocks;
    for (u64 unit = blockIdx.x * (u64)(blockDim.x / LANES) + threadIdx.x / LANES; unit < units;
         unit += warps) {
        const unsigned block = unit / per_block;
        const unsigned rest = unit % per_block;
        const Page page = chunk.pages[rest / chunk.units_per_page];
        const u64 first = (u64)(rest % chunk.units_per_page) * UNIT;
        const u64 count = page.bytes / sizeof(V);
        V *paged = (V *)(page.base + (u64)blocks.ids[block] * page.stride);
        V *packed = (V *)(chunk.stage + block * chunk.block_bytes + page.offset);
        V *dst = SCATTER ? paged : packed;
        const V *src = SCATTER ? packed : paged;
        V held[LOADS];
#pragma unroll
        for (unsigned k = 0; k < LOADS; ++k) {
            const u64 at = first + k * LANES + lane;
            if (at < count) held[k] = src[at];
        }
#pragma unroll
        for (unsigned k = 0; k < LOADS; ++k) {
            const u64 at = first + k * LANES + lane;
            if (at < count) dst[at] = held[k];
        }
    }
}

constexpr unsigned TILE = 2048, PACKED_TILE = 1568, CODES = 1024, TAIL = 1536, ESCAPES = 30;
// Vectors of 8 values that each thread has of a tile.
constexpr unsigned VECTORS = 4;

// The sum of a value over the lanes before this one, and over all.
__device__ __forceinline__ unsigned before(unsigned value, unsigned lane, unsigned &all) {
    unsigned sum = value;
#pragma unroll
    for (unsigned step = 1; step < LANES; step *= 2) {
        const unsigned other = __shfl_up_sync(ALL, sum, step);
        sum += lane >= step ? other : 0;
    }
    all = __shfl_sync(ALL, sum, LANES - 1);
    return sum - value;
}

// The exponents of the four values in two words, one per byte.
__device__ __forceinline__ unsigned exponents(unsigned a, unsigned b) {
    return __byte_perm(a << 1, b << 1, 0x7531);
}

// Sign and mantissa of the four values in two words, one per byte.
__device__ __forceinline__ unsigned rests(unsigned a, unsigned b) {
    return __byte_perm((a & 0x007f007f) | (a >> 8 & 0x00800080),
                       (b & 0x007f007f) | (b >> 8 & 0x00800080), 0x6420);
}

// Two values: rests and exponents of bytes 0 and 1, or of bytes 2 and 3.
__device__ __forceinline__ unsigned join(unsigned rest, unsigned exponent, bool upper) {
    const unsigned r = __byte_perm(rest, 0, upper ? 0x4342 : 0x4140);
    return (r & 0x007f007f) | (r & 0x00800080) << 8 |
           __byte_perm(exponent, 0, upper ? 0x3424 : 0x1404) >> 1;
}

// The codes of four values, one per byte. escaped: bytes 0xff where they are escapes.
__device__ __forceinline__ unsigned encode(unsigned largest, unsigned e, unsigned &escaped) {
    const unsigned distance = __vsub4(largest, e), zero = __vcmpeq4(e, 0);
    escaped = __vcmpgeu4(distance, 0x0e0e0e0e) & ~zero;
    return (distance & ~(escaped | zero)) | (escaped & 0x0f0f0f0f) | (zero & 0x0e0e0e0e);
}

__device__ __forceinline__ unsigned decode(unsigned largest, unsigned codes, unsigned &escaped) {
    escaped = __vcmpeq4(codes, 0x0f0f0f0f);
    return __vsub4(largest, codes) & ~__vcmpeq4(codes, 0x0e0e0e0e);
}

// Four codes in the bytes of a word as 16 bits, and back.
__device__ __forceinline__ unsigned narrow(unsigned codes) {
    return __byte_perm(codes | codes >> 4, 0, 0x4420);
}

__device__ __forceinline__ unsigned widen(unsigned codes) {
    const unsigned pairs = (codes & 0xff) | (codes & 0xff00) << 8;
    return (pairs | pairs << 4) & 0x0f0f0f0f;
}

__device__ __forceinline__ unsigned count(unsigned escaped0, unsigned escaped1) {
    return (__popc(escaped0) + __popc(escaped1)) / 8;
}

__device__ bool pack_tile(const uint4 *src, char *dst, unsigned lane) {
    uint4 held[VECTORS];
    unsigned largest = 0;
#pragma unroll
    for (unsigned k = 0; k < VECTORS; ++k) held[k] = src[k * LANES + lane];
#pragma unroll
    for (unsigned k = 0; k < VECTORS; ++k) {
        largest = __vmaxu4(largest, exponents(held[k].x, held[k].y));
        largest = __vmaxu4(largest, exponents(held[k].z, held[k].w));
    }
    largest = __vmaxu4(largest, largest >> 16);
    largest = max(largest & 0xff, largest >> 8 & 0xff);
#pragma unroll
    for (unsigned step = LANES / 2; step; step /= 2)
        largest = max(largest, __shfl_xor_sync(ALL, largest, step));
    u8 *tail = (u8 *)dst + TAIL;
    if (lane < 8) ((unsigned *)tail)[lane] = 0;  // no bytes of others are left in it
    __syncwarp();
    unsigned escapes = 0;
#pragma unroll
    for (unsigned k = 0; k < VECTORS; ++k) {
        const uint4 v = held[k];
        const unsigned e0 = exponents(v.x, v.y), e1 = exponents(v.z, v.w);
        unsigned escaped0, escaped1;
        const unsigned c0 = encode(largest * 0x01010101u, e0, escaped0);
        const unsigned c1 = encode(largest * 0x01010101u, e1, escaped1);
        ((uint2 *)dst)[k * LANES + lane] = make_uint2(rests(v.x, v.y), rests(v.z, v.w));
        ((unsigned *)(dst + CODES))[k * LANES + lane] = narrow(c0) | narrow(c1) << 16;
        if (__any_sync(ALL, escaped0 | escaped1)) {
            unsigned all, place = escapes + before(count(escaped0, escaped1), lane, all);
#pragma unroll 1
            for (unsigned i = 0; i < 8; ++i) {
                const unsigned shift = 8 * (i % 4);
                if ((i < 4 ? escaped0 : escaped1) >> shift & 1) {
                    if (place < ESCAPES) tail[2 + place] = (i < 4 ? e0 : e1) >> shift;
                    ++place;
                }
            }
            escapes += all;
        }
    }
    if (lane == 0) tail[0] = largest, tail[1] = min(escapes, 255);
    return escapes <= ESCAPES;
}

__device__ void unpack_tile(const char *src, uint4 *dst, unsigned lane) {
    uint2 held[VECTORS];
    unsigned codes[VECTORS];
#pragma unroll
    for (unsigned k = 0; k < VECTORS; ++k) held[k] = ((const uint2 *)src)[k * LANES + lane];
#pragma unroll
    for (unsigned k = 0; k < VECTORS; ++k)
        codes[k] = ((const unsigned *)(src + CODES))[k * LANES + lane];
    const u8 *tail = (const u8 *)src + TAIL;
    const unsigned largest = tail[0] * 0x01010101u;
    unsigned escapes = 0;
#pragma unroll
    for (unsigned k = 0; k < VECTORS; ++k) {
        unsigned escaped0, escaped1;
        unsigned e0 = decode(largest, widen(codes[k] & 0xffff), escaped0);
        unsigned e1 = decode(largest, widen(codes[k] >> 16), escaped1);
        if (__any_sync(ALL, escaped0 | escaped1)) {
            unsigned all, place = escapes + before(count(escaped0, escaped1), lane, all);
#pragma unroll 1
            for (unsigned i = 0; i < 8; ++i) {
                const unsigned shift = 8 * (i % 4), byte = 0xffu << shift;
                if ((i < 4 ? escaped0 : escaped1) >> shift & 1) {
                    const unsigned e = (unsigned)tail[2 + min(place, ESCAPES - 1)] << shift;
                    if (i < 4) e0 = (e0 & ~byte) | e; else e1 = (e1 & ~byte) | e;
                    ++place;
                }
            }
            escapes += all;
        }
        dst[k * LANES + lane] = make_uint4(join(held[k].x, e0, false), join(held[k].x, e0, true),
                                           join(held[k].y, e1, false), join(held[k].y, e1, true));
    }
}

template <bool UNPACK, int N>
__device__ __forceinline__ void move_packed(const Chunk &chunk, const Blocks<N> &blocks) {
    const unsigned lane = threadIdx.x % LANES;
    const u64 warps = (u64)gridDim.x * (blockDim.x / LANES);
    const unsigned per_block = chunk.pages_per_block * chunk.units_per_page;
    const u64 units = (u64)per_block * chunk.blocks;
    for (u64 unit = blockIdx.x * (u64)(blockDim.x / LANES) + threadIdx.x / LANES; unit < units;
         unit += warps) {
        const unsigned block = unit / per_block;
        const unsigned rest = unit % per_block;
        const Page page = chunk.pages[rest / chunk.units_per_page];
        const u64 tile = rest % chunk.units_per_page;
        if (tile * TILE >= page.bytes) continue;
        uint4 *paged = (uint4 *)(page.base + (u64)blocks.ids[block] * page.stride + tile * TILE);
        char *packed = chunk.stage + block * chunk.block_bytes + page.offset + tile * PACKED_TILE;
        if (UNPACK)
            unpack_tile(packed, paged, lane);
        else if (!pack_tile(paged, packed, lane))
            chunk.unpackable[(chunk.at + block * chunk.block_bytes) >> 10] = 1;
    }
}

#define PACKED_KERNEL(NAME, UNPACK, N)                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        NAME##_##N(const __grid_constant__ Chunk chunk, const __grid_constant__ Blocks<N> blocks) { \
        move_packed<UNPACK, N>(chunk, blocks);                                                     \
    }

#define KERNEL(NAME, V, SCATTER, N)                                                                \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        NAME##_##N(const __grid_constant__ Chunk chunk, const __grid_constant__ Blocks<N> blocks) { \
        move<V, SCATTER, N>(chunk, blocks);                                                        \
    }

// A chunk with few blocks needs few bytes of parameters. 8000 ids are near the limit of 32,764 bytes.
#define KERNELS(NAME, V, SCATTER)  \
    KERNEL(NAME, V, SCATTER, 128)  \
    KERNEL(NAME, V, SCATTER, 1000) \
    KERNEL(NAME, V, SCATTER, 8000)

KERNELS(gather16, Vec16, false)
KERNELS(scatter16, Vec16, true)
KERNELS(gather4, unsigned, false)
KERNELS(scatter4, unsigned, true)
KERNELS(gather1, unsigned char, false)
KERNELS(scatter1, unsigned char, true)
PACKED_KERNEL(pack, false, 128)
PACKED_KERNEL(pack, false, 1000)
PACKED_KERNEL(pack, false, 8000)
PACKED_KERNEL(unpack, true, 128)
PACKED_KERNEL(unpack, true, 1000)
PACKED_KERNEL(unpack, true, 8000)
