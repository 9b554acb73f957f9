/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Acts as a VLAN sub-interface on the packets of the port below it, for kernels that can make none:
 * adds a tag to leaving packets, removes it from arriving ones. Counts packets without a tag, with
 * one, and with two.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>

/* As in libbpf's headers, which cannot be included: they lie where libbpf's crate was built. */
#define SEC(name) __attribute__((section(name), used))

static void *(*bpf_map_lookup_elem)(void *, const void *) = (void *) BPF_FUNC_map_lookup_elem;
static long (*bpf_skb_vlan_push)(struct __sk_buff *, __be16,
                                 __u16) = (void *) BPF_FUNC_skb_vlan_push;
static long (*bpf_skb_vlan_pop)(struct __sk_buff *) = (void *) BPF_FUNC_skb_vlan_pop;

/* Types of VLAN tags in network order, and a tag's priority in host order. */
#define DOT1Q      __builtin_bswap16(0x8100)
#define DOT1AD     __builtin_bswap16(0x88a8)
#define PRIORITY_5 (5 << 13)

/* Number of frames, by their number of tags: 0, 1 or 2. */
struct {
    int (*type)[BPF_MAP_TYPE_ARRAY];
    int (*max_entries)[3];
    __u32 *key;
    __u64 *value;
} frames SEC(".maps");

static int tag(struct __sk_buff *skb, __u16 vlan)
{
    return bpf_skb_vlan_push(skb, DOT1Q, PRIORITY_5 | vlan) ? TC_ACT_SHOT : TC_ACT_UNSPEC;
}

SEC("tc")
int tag_42(struct __sk_buff *skb)
{
    return tag(skb, 42);
}

SEC("tc")
int tag_7(struct __sk_buff *skb)
{
    return tag(skb, 7);
}

SEC("tc")
int untag(struct __sk_buff *skb)
{
    return skb->vlan_present && bpf_skb_vlan_pop(skb) ? TC_ACT_SHOT : TC_ACT_UNSPEC;
}

SEC("tc")
int look(struct __sk_buff *skb)
{
    __u32 tags = skb->vlan_present;

    if (tags && (skb->protocol == DOT1Q || skb->protocol == DOT1AD))
        tags = 2;
    __u64 *count = bpf_map_lookup_elem(&frames, &tags);
    if (count)
        __sync_fetch_and_add(count, 1);
    return TC_ACT_UNSPEC;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
