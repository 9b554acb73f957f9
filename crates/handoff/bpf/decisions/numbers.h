/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Integer types, times, and sequence numbers (RFC 9293, 3.4). Sequence numbers wrap, and two of
 * them can be compared only if they are less than 2^31 apart (RFC 1982).
 */
#ifndef NUMBERS_H
#define NUMBERS_H

#include <stdbool.h>
#include <stddef.h>

#include <linux/types.h>

/* Has the compiler inline a function in any case: code under a BPF spin lock may call no function
 * (kernel/bpf/verifier.c). */
#undef __always_inline
#define __always_inline inline __attribute__((always_inline))

/* Makes the compiler forget what it knows of a value, as in libbpf. With that knowledge it may make
 * code that the verifier refuses: the verifier allows no arithmetic on fields of some pointers. */
#ifndef barrier_var
#define barrier_var(var) asm volatile("" : "+r"(var))
#endif

static __always_inline bool is_before(__u32 a, __u32 b)
{
    return (__s32) (a - b) < 0;
}

static __always_inline __u32 later(__u32 a, __u32 b)
{
    return is_before(a, b) ? b : a;
}

/* Whether more than `ns` nanoseconds have passed from the time `then` to `now`. `then` may be the
 * later one: the coarse clock is behind the exact one by up to a jiffy, and another core may have
 * stored a time after this one has read its clock. So the difference is signed. */
static __always_inline bool is_longer_ago(__u64 then, __u64 now, __s64 ns)
{
    return (__s64) (now - then) > ns;
}

#endif
