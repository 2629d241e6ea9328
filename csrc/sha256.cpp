#include "sha256.h"

#include <cstring>

#include "cpu_features.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tiered_kv {
namespace {

constexpr size_t kChunk = 64;

alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

uint32_t rotate(uint32_t x, int bits) { return (x >> bits) | (x << (32 - bits)); }

uint32_t load_big_endian(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | p[3];
}

void compress_portable(uint32_t state[8], const uint8_t* data, size_t chunks) {
  for (; chunks > 0; --chunks, data += kChunk) {
    uint32_t w[64];
    for (size_t i = 0; i < 16; ++i) w[i] = load_big_endian(data + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; ++i) {
      const uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      const uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1;
      d = c, c = b, b = a, a = t1 + t2;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
  }
}

#if defined(__x86_64__)

__attribute__((target("sha,sse4.1"))) void compress_sha_ni(uint32_t state[8], const uint8_t* data,
                                                           size_t chunks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  __m128i* const halves = reinterpret_cast<__m128i*>(state);
  // The SHA instructions expect the state in the order ABEF and CDGH.
  const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(halves), 0xB1);
  const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(halves + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(badc, hgfe, 8);
  __m128i cdgh = _mm_blend_epi16(hgfe, badc, 0xF0);
  for (; chunks > 0; --chunks, data += kChunk) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
    for (size_t i = 0; i < 4; ++i) {
      w[i] =
          _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i)), swap);
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < 16; ++i) {
      __m128i message =
          _mm_add_epi32(w[i & 3], _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * i)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, message);
      message = _mm_shuffle_epi32(message, 0x0E);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, message);
      if (i < 12) {
        const __m128i newest = w[(i + 3) & 3];
        __m128i next = _mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]);
        next = _mm_add_epi32(next, _mm_alignr_epi8(newest, w[(i + 2) & 3], 4));
        w[i & 3] = _mm_sha256msg2_epu32(next, newest);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(halves, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(halves + 1, _mm_alignr_epi8(dchg, feba, 8));
}

#endif

void compress(uint32_t state[8], const uint8_t* data, size_t chunks) {
#if defined(__x86_64__)
  if (has_sha_ni()) return compress_sha_ni(state, data, chunks);
#endif
  compress_portable(state, data, chunks);
}

void store_digest(const uint32_t state[8], uint8_t digest[kSha256Bytes]) {
  uint32_t words[8];
  for (int i = 0; i < 8; ++i) words[i] = __builtin_bswap32(state[i]);
  std::memcpy(digest, words, kSha256Bytes);
}

// Writes the padding of a message of `size` bytes, of which the last `rest` lie before `tail`.
size_t pad(uint8_t* tail, size_t rest, size_t size) {
  const size_t end = (rest + 9 + kChunk - 1) / kChunk * kChunk;
  std::memset(tail + rest, 0, end - rest);
  tail[rest] = 0x80;
  const uint64_t bits = __builtin_bswap64(uint64_t(size) * 8);
  std::memcpy(tail + end - sizeof(bits), &bits, sizeof(bits));
  return end / kChunk;
}

}  // namespace

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are swapped to big-endian");

size_t sha256_pad(uint8_t* message, size_t size) { return pad(message, size, size); }

void sha256_padded(const uint8_t* message, size_t chunks, uint8_t digest[kSha256Bytes]) {
  uint32_t state[8];
  std::memcpy(state, kInitial, sizeof(state));
  compress(state, message, chunks);
  store_digest(state, digest);
}

void sha256(const uint8_t* data, size_t size, uint8_t digest[kSha256Bytes]) {
  uint32_t state[8];
  std::memcpy(state, kInitial, sizeof(state));
  const size_t whole = size / kChunk;
  if (whole > 0) compress(state, data, whole);
  uint8_t tail[2 * kChunk];
  const size_t rest = size % kChunk;
  if (rest > 0) std::memcpy(tail, data + whole * kChunk, rest);
  const size_t chunks = pad(tail, rest, size);
  compress(state, tail, chunks);
  store_digest(state, digest);
}

}  // namespace tiered_kv
