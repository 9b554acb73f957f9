/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Marks on packets that pass our programs a second time. A program that does not recognize a packet
 * of its own handles it as a new one: fe_in, the frontend's program on ingress, would clone its
 * clone, without end. Other programs on the interface, which run before ours, may overwrite
 * skb->mark. So the mark is also in skb->tc_index, which they hardly use and which stays when a
 * packet is cloned or redirected. One of the two is enough to recognize the packet.
 *
 * A mark holds the number of the layout (steering.h), so that the programs of other layouts, which
 * run beside ours, leave the packet alone. Its lowest 4 bits hold a number for the program.
 */
#ifndef MARKS_H
#define MARKS_H

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "steering.h"

#define MARK_OF(kind) (0x53480000 | STEERING_LAYOUT << 8 | (kind) << 4)
#define NUMBER_MASK   0xf

/* The mark as skb->tc_index has it, which is 16 bits wide. Layouts, at most 32, leave the upper two
 * bits free. These bits are set, because queueing disciplines put small numbers into tc_index. */
#define TC_INDEX_OF(mark) (0xc000 | (0xffff & (mark)))

/* Returned by take_mark for a packet without the mark. */
#define NOT_MARKED (-1)

struct marks {
    __u32 mark;
    __u32 tc_index;
};

/* Marks a packet. Returns its former mark and tc_index. */
static __always_inline struct marks put_mark(struct __sk_buff *skb, __u32 mark)
{
    struct marks before = {.mark = skb->mark, .tc_index = skb->tc_index};

    skb->mark = mark;
    skb->tc_index = TC_INDEX_OF(mark);
    return before;
}

static __always_inline void restore_marks(struct __sk_buff *skb, const struct marks *before)
{
    skb->mark = before->mark;
    skb->tc_index = before->tc_index;
}

/* Takes a mark off a packet. Returns the number in it, or NOT_MARKED. A value that another program
 * has put in place of the mark stays. */
static __always_inline int take_mark(struct __sk_buff *skb, __u32 mark)
{
    __u32 in_mark = skb->mark ^ mark;
    __u32 in_tc_index = skb->tc_index ^ TC_INDEX_OF(mark);
    int number = NOT_MARKED;

    if (in_tc_index <= NUMBER_MASK) {
        number = in_tc_index;
        skb->tc_index = 0;
    }
    if (in_mark <= NUMBER_MASK) {
        number = in_mark;
        skb->mark = 0;
    }
    return number;
}

#endif
