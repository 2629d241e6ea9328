#include "xxh3.h"

#include <cstring>

#include "cpu_features.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tiered_kv {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as stored");

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t kPrimeMx1 = 0x165667919E3779F9, kPrimeMx2 = 0x9FB21C651E98DF25;

constexpr size_t kSecretBytes = 192;
alignas(64) constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

// For long inputs each stripe of 64 bytes advances the secret by 8 bytes; a round is the number of
// stripes until the secret is used up.
constexpr size_t kStripe = 64;
constexpr size_t kSecretStep = 8;
constexpr size_t kRoundStripes = (kSecretBytes - kStripe) / kSecretStep;
constexpr size_t kRoundBytes = kRoundStripes * kStripe;
// Smaller copies stay in the CPU caches for the next reader.
[[maybe_unused]] constexpr size_t kStreamedBytes = 64 << 10;

uint32_t read32(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

uint64_t read64(const uint8_t* p) {
  uint64_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

uint64_t secret64(size_t offset) { return read64(kSecret + offset); }

uint64_t rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

uint64_t fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return uint64_t(product) ^ uint64_t(product >> 64);
}

uint64_t avalanche(uint64_t h) {
  h ^= h >> 37;
  h *= kPrimeMx1;
  return h ^ (h >> 32);
}

uint64_t avalanche_short(uint64_t h) {
  h ^= h >> 33;
  h *= kPrime64_2;
  h ^= h >> 29;
  h *= kPrime64_3;
  return h ^ (h >> 32);
}

uint64_t hash_0_to_16(const uint8_t* data, size_t size) {
  if (size > 8) {
    const uint64_t low = read64(data) ^ secret64(24) ^ secret64(32);
    const uint64_t high = read64(data + size - 8) ^ secret64(40) ^ secret64(48);
    return avalanche(size + __builtin_bswap64(low) + high + fold(low, high));
  }
  if (size >= 4) {
    const uint64_t both = read32(data + size - 4) + (uint64_t{read32(data)} << 32);
    uint64_t h = both ^ secret64(8) ^ secret64(16);
    h ^= rotate(h, 49) ^ rotate(h, 24);
    h *= kPrimeMx2;
    h ^= (h >> 35) + size;
    h *= kPrimeMx2;
    return h ^ (h >> 28);
  }
  if (size > 0) {
    const uint32_t mixed = uint32_t{data[0]} << 16 | uint32_t{data[size >> 1]} << 24 |
                           uint32_t{data[size - 1]} | uint32_t(size) << 8;
    return avalanche_short(uint64_t{mixed} ^ (read32(kSecret) ^ read32(kSecret + 4)));
  }
  return avalanche_short(secret64(56) ^ secret64(64));
}

uint64_t mix16(const uint8_t* data, size_t secret) {
  return fold(read64(data) ^ secret64(secret), read64(data + 8) ^ secret64(secret + 8));
}

uint64_t hash_17_to_128(const uint8_t* data, size_t size) {
  uint64_t acc = size * kPrime64_1;
  for (size_t i = (size - 1) / 32 + 1; i-- > 0;) {
    acc += mix16(data + 16 * i, 32 * i);
    acc += mix16(data + size - 16 * (i + 1), 32 * i + 16);
  }
  return avalanche(acc);
}

uint64_t hash_129_to_240(const uint8_t* data, size_t size) {
  uint64_t acc = size * kPrime64_1;
  for (size_t i = 0; i < 8; ++i) acc += mix16(data + 16 * i, 16 * i);
  acc = avalanche(acc);
  for (size_t i = 8; i < size / 16; ++i) acc += mix16(data + 16 * i, 16 * (i - 8) + 3);
  return avalanche(acc + mix16(data + size - 16, 136 - 17));
}

struct alignas(64) Lanes {
  uint64_t v[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                   kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
};

void accumulate_portable(Lanes& lanes, const uint8_t* data, const uint8_t* secret, size_t stripes) {
  for (; stripes > 0; --stripes, data += kStripe, secret += kSecretStep) {
    for (size_t i = 0; i < 8; ++i) {
      const uint64_t value = read64(data + 8 * i);
      const uint64_t keyed = value ^ read64(secret + 8 * i);
      lanes.v[i ^ 1] += value;
      lanes.v[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
    }
  }
}

void scramble(Lanes& lanes) {
  for (size_t i = 0; i < 8; ++i) {
    uint64_t acc = lanes.v[i];
    acc ^= acc >> 47;
    acc ^= secret64(kSecretBytes - kStripe + 8 * i);
    lanes.v[i] = acc * kPrime32_1;
  }
}

void consume_portable(Lanes& lanes, const uint8_t* data, size_t size) {
  const uint8_t* const last = data + size - kStripe;
  size_t left = size - 1;  // the last stripe is always separate, even if it completes a round
  for (; left >= kRoundBytes; left -= kRoundBytes, data += kRoundBytes) {
    accumulate_portable(lanes, data, kSecret, kRoundStripes);
    scramble(lanes);
  }
  accumulate_portable(lanes, data, kSecret, left / kStripe);
  accumulate_portable(lanes, last, kSecret + kSecretBytes - kStripe - 7, 1);
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) inline __m256i load256(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

__attribute__((target("avx2"))) inline __m256i accumulate_value(__m256i acc, __m256i value,
                                                                const uint8_t* secret) {
  const __m256i keyed = _mm256_xor_si256(value, load256(secret));
  const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
  const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
  return _mm256_add_epi64(acc, _mm256_add_epi64(product, swapped));
}

__attribute__((target("avx2"))) inline __m256i accumulate_half(__m256i acc, const uint8_t* data,
                                                               const uint8_t* secret) {
  return accumulate_value(acc, load256(data), secret);
}

__attribute__((target("avx2"))) inline __m256i scramble_half(__m256i acc, const uint8_t* secret) {
  const __m256i prime = _mm256_set1_epi32(int(kPrime32_1));
  __m256i mixed = _mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47));
  mixed = _mm256_xor_si256(mixed, load256(secret));
  const __m256i low = _mm256_mul_epu32(mixed, prime);
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
  return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

// Bypasses the caches with streaming stores: a block is larger than the caches, and a cache line
// that is written completely need not be read first.
template <size_t kAlignment>
__attribute__((target("avx2"))) inline void stream256(uint8_t* into, __m256i value) {
  if constexpr (kAlignment == 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(into), value);
  } else {
    auto* const halves = reinterpret_cast<__m128i*>(into);
    _mm_stream_si128(halves, _mm256_castsi256_si128(value));
    _mm_stream_si128(halves + 1, _mm256_extracti128_si256(value, 1));
  }
}

// If `kAlignment` is not 0, the bytes are also copied to `into`, which has that alignment.
template <size_t kAlignment>
__attribute__((target("avx2"))) void consume_avx2(Lanes& lanes, const uint8_t* data, size_t size,
                                                  uint8_t* into) {
  __m256i* const halves = reinterpret_cast<__m256i*>(lanes.v);
  __m256i a = _mm256_load_si256(halves), b = _mm256_load_si256(halves + 1);
  const uint8_t* const last = data + size - kStripe;
  size_t left = size - 1;
  for (; left >= kRoundBytes; left -= kRoundBytes, data += kRoundBytes) {
#pragma GCC unroll 16
    for (size_t i = 0; i < kRoundStripes; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(data + i * kStripe + 512), _MM_HINT_T0);
      const __m256i low = load256(data + i * kStripe), high = load256(data + i * kStripe + 32);
      if constexpr (kAlignment > 0) {
        stream256<kAlignment>(into + i * kStripe, low);
        stream256<kAlignment>(into + i * kStripe + 32, high);
      }
      a = accumulate_value(a, low, kSecret + i * kSecretStep);
      b = accumulate_value(b, high, kSecret + i * kSecretStep + 32);
    }
    a = scramble_half(a, kSecret + kSecretBytes - kStripe);
    b = scramble_half(b, kSecret + kSecretBytes - kStripe + 32);
    if constexpr (kAlignment > 0) into += kRoundBytes;
  }
  for (size_t i = 0; i < left / kStripe; ++i) {
    a = accumulate_half(a, data + i * kStripe, kSecret + i * kSecretStep);
    b = accumulate_half(b, data + i * kStripe + 32, kSecret + i * kSecretStep + 32);
  }
  a = accumulate_half(a, last, kSecret + kSecretBytes - kStripe - 7);
  b = accumulate_half(b, last + 32, kSecret + kSecretBytes - kStripe - 7 + 32);
  _mm256_store_si256(halves, a);
  _mm256_store_si256(halves + 1, b);
  if constexpr (kAlignment > 0) {
    std::memcpy(into, data, size_t(last + kStripe - data));
    _mm_sfence();  // orders the streaming stores before the publication of the block
  }
}

#endif

uint64_t merge(const Lanes& lanes, size_t size) {
  uint64_t acc = size * kPrime64_1;
  for (size_t i = 0; i < 4; ++i) {
    acc += fold(lanes.v[2 * i] ^ secret64(11 + 16 * i), lanes.v[2 * i + 1] ^ secret64(19 + 16 * i));
  }
  return avalanche(acc);
}

uint64_t hash_long(const uint8_t* data, size_t size) {
  Lanes lanes;
#if defined(__x86_64__)
  if (has_avx2()) {
    consume_avx2<0>(lanes, data, size, nullptr);
    return merge(lanes, size);
  }
#endif
  consume_portable(lanes, data, size);
  return merge(lanes, size);
}

}  // namespace

uint64_t xxh3_64(const uint8_t* data, size_t size) {
  if (size <= 16) return hash_0_to_16(data, size);
  if (size <= 128) return hash_17_to_128(data, size);
  if (size <= 240) return hash_129_to_240(data, size);
  return hash_long(data, size);
}

uint64_t copy_xxh3_64(uint8_t* into, const uint8_t* data, size_t size) {
#if defined(__x86_64__)
  const auto address = reinterpret_cast<uintptr_t>(into);
  if (size >= kStreamedBytes && address % 16 == 0 && has_avx2()) {
    Lanes lanes;
    const auto consume = address % 32 == 0 ? consume_avx2<32> : consume_avx2<16>;
    consume(lanes, data, size, into);
    return merge(lanes, size);
  }
#endif
  if (size > 0) std::memcpy(into, data, size);
  return xxh3_64(into, size);
}

}  // namespace tiered_kv
