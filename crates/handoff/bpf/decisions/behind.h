/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * A server that may write while another machine sends (SHUNT_APPEND). The server's kernel queues
 * what it writes, as for a client whose window is full. So poll(2), EAGAIN, close(2) and the end of
 * a process work as without Shunt, and no other queue is needed for these bytes. The region is the
 * range of sequence numbers that the other machine sends.
 *
 * Two things keep the kernel from sending. First, fe_out (the program on egress) refuses segments
 * that lie behind the region. The kernel takes that for congestion on its own machine, keeps them
 * in its queue, and tries again when an ACK comes, or twice a second. Second, fe_in (on ingress)
 * changes the client's ACKs for the kernel: they say that there is no window behind the region. The
 * kernel then only probes, less and less often. The ACK of the region's end comes with the client's
 * real window.
 *
 * The client may be silent, because its last ACK came earlier and no backend sends yet. Then fe_out
 * sends it a probe in place of a refused segment, and the client's answer goes to the kernel. A
 * kernel that hears nothing gives up a closed connection after eight tries. Linux before 6.6
 * accepts a window of 0 only from an ACK of new data. So such a kernel tries again, and fe_out
 * probes, twice a second.
 *
 * The backend may be lost while this machine's agent, which would act on that, is gone. The kernel
 * would then wait for ever, because the client answers each probe. So the connection of a client
 * that has room, but has acknowledged nothing for a minute (IDLE_NS), is reset when its server's
 * kernel next has a segment for it.
 */
#ifndef BEHIND_H
#define BEHIND_H

#include "../steering.h"
#include "numbers.h"
#include "packet.h"
#include "spaces.h"

/* Silence of both sides, in nanoseconds, after which the client is sent a probe. */
#define UNHEARD_NS 100000000
/* Time, in nanoseconds, after which a client that has room but acknowledges nothing is given up. A
 * backend's agent gives up such a client after `progress` (configuration), which is by default the
 * same time. */
#define IDLE_NS    60000000000ll

static __always_inline bool is_queueing(const struct flow *flow)
{
    return flow->flags & FLOW_QUEUES && flow->spaces.status == SHUNT_REGION_ACTIVE;
}

/* Returns the window field for an ACK that the server's kernel gets. `ack`: that ACK's number, as
 * the kernel counts. The window ends at the region's start at the latest. It is rounded up:
 * otherwise the last bytes before the region might not fit, and would wait for ever. */
static __always_inline __u16 window_before(const struct flow *flow, __u32 ack, __u16 window)
{
    __u32 room = nth_break(&flow->spaces, 0)->local - ack;
    __u32 field = (room + (1u << flow->snd_wscale) - 1) >> flow->snd_wscale;

    return (__s32) room >= 0 && field < window ? field : window;
}

/* Whether a part of a segment lies behind the region. The segment has bytes or a FIN, and its bytes
 * end at `end`. A FIN on the last bytes before the region does not count: it is cut off, and the
 * kernel sends it again later. */
static __always_inline bool lies_behind(const struct flow *flow, const struct packet *p, __u32 end)
{
    __u32 local = nth_break(&flow->spaces, 0)->local;

    return is_before(local, end) || (p->flags & TH_FIN && !is_before(p->seq, local));
}

/* Whether the client has had room, but has acknowledged nothing, for more than IDLE_NS. */
static __always_inline bool is_given_up(struct flow *flow, __u64 now)
{
    bool has_room = (__u32) flow->client_window << flow->snd_wscale >= flow->mss;

    if (!flow->idle_ns || !has_room || flow->idle_acked != flow->spaces.acked) {
        flow->idle_acked = flow->spaces.acked;
        flow->idle_ns = now;
    }
    return is_longer_ago(flow->idle_ns, now, IDLE_NS);
}

#endif
