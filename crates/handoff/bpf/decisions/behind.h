/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * A server that may write while another machine sends (SHUNT_APPEND). Its own kernel queues what it
 * writes, as it queues bytes for a client whose window is full. So poll, EAGAIN, close and the end
 * of a process mean what they always mean, and no byte needs a queue of ours.
 *
 * Two things keep the kernel from sending. Its segments that lie behind the region are refused as
 * they leave: it takes that for congestion on its own machine, keeps them in its queue, and tries
 * again when an ACK comes, or twice a second. And the ACKs that it gets of its client meanwhile say
 * that there is no window behind the region: then it only probes, less and less often. The ACK of
 * the region's end comes with the client's real window.
 *
 * If the client is silent, because its last ACK came earlier and no backend sends yet, it is
 * asked for an ACK, as by a window probe: a kernel that hears nothing gives a closed connection up
 * after eight tries. Linux before 6.6 accepts a window of 0 only from an ACK of new data: there the
 * kernel continues to try, and to ask, twice a second.
 *
 * If no backend sends any more, and this machine's agent is gone and cannot say so, all that
 * would last for ever, because the client answers. So a client that has room and has got nothing
 * for a minute is reset, as soon as its server's kernel has a segment for it.
 */
#ifndef BEHIND_H
#define BEHIND_H

#include "../steering.h"
#include "numbers.h"
#include "packet.h"
#include "spaces.h"

#define UNHEARD_NS 100000000
/* Default time after which a backend gives a client up that acknowledges nothing (`progress` of its
 * agent). */
#define IDLE_NS    60000000000ll

static __always_inline bool is_queueing(const struct flow *flow)
{
    return flow->flags & FLOW_QUEUES && flow->spaces.status == SHUNT_REGION_ACTIVE;
}

/* Window field of an ACK of `ack` (LOCAL) for the server: its window ends at the region. It is
 * rounded up, or bytes that the server has not sent yet would wait for ever. */
static __always_inline __u16 window_before(const struct flow *flow, __u32 ack, __u16 window)
{
    __u32 room = nth_break(&flow->spaces, 0)->local - ack;
    __u32 field = (room + (1u << flow->snd_wscale) - 1) >> flow->snd_wscale;

    return (__s32) room >= 0 && field < window ? field : window;
}

/* Whether any of a segment lies behind the region. The segment has bytes or a FIN. A FIN on the
 * last bytes before the region is cut off; the kernel sends it again later. */
static __always_inline bool lies_behind(const struct flow *flow, const struct packet *p, __u32 end)
{
    __u32 local = nth_break(&flow->spaces, 0)->local;

    return is_before(local, end) || (p->flags & TH_FIN && !is_before(p->seq, local));
}

/* Whether a client that has room has got nothing for long, though its server has more to send. */
static __always_inline bool is_given_up(struct flow *flow, __u64 now)
{
    bool has_room = (__u32) flow->client_window << flow->snd_wscale >= flow->mss;

    if (!flow->idle_ns || !has_room || flow->idle_acked != flow->spaces.acked) {
        flow->idle_acked = flow->spaces.acked;
        flow->idle_ns = now;
    }
    /* `now` was read before the lock was taken: another core's may be later. */
    return (__s64) (now - flow->idle_ns) > IDLE_NS;
}

#endif
