/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Integer types, and sequence numbers (RFC 9293, 3.4). Sequence numbers wrap, and two of them can
 * be compared only if they are less than 2^31 apart (RFC 1982).
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

#endif
