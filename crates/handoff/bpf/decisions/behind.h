/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * A server that may write on while another machine sends (SHUNT_APPEND). What it writes is queued
 * by its own kernel, as bytes are for which a client has no room: so that poll, EAGAIN, close and
 * the end of a process mean what they always mean, and no byte needs a place of ours.
 *
 * The kernel is kept from sending by two things. Its segments of what lies behind the region are
 * refused where they would leave: it takes that for congestion of its own machine, leaves them in
 * its queue, and tries again when an ACK comes, or twice a second. And what it hears of its client
 * meanwhile says that there is no room behind the region: then it only probes, more and more
 * rarely. The ACK of the region's end comes with the client's real window.
 *
 * Where nothing is heard of the client, because its last ACK came before and nobody sends yet, it
 * is asked for one, as by a probe of a window: a kernel that hears nothing gives a closed
 * connection up after eight tries. Linux before 6.6 takes a window of 0 only from an ACK of
 * something new: there it goes on to try, and to ask, twice a second.
 *
 * Where nobody sends any more, and nobody says so because this machine's agent is gone, all that
 * would go on for ever: the client answers. So a client that has room and got nothing for a minute
 * is reset, as soon as its server's kernel has something to say to it.
 */
#ifndef BEHIND_H
#define BEHIND_H

#include "../steering.h"
#include "numbers.h"
#include "packet.h"
#include "spaces.h"

#define UNHEARD_NS 100000000
/* As long as a backend goes on without an ACK (`progress` of its agent), by default. */
#define IDLE_NS    60000000000ll

static __always_inline bool is_queueing(const struct flow *flow)
{
    return flow->flags & FLOW_QUEUES && flow->spaces.status == SHUNT_REGION_ACTIVE;
}

/* The window field for an ACK of `ack` (LOCAL) that goes to the server: up to the region. Rounded
 * up, or bytes that it has not sent yet would wait for ever. */
static __always_inline __u16 window_before(const struct flow *flow, __u32 ack, __u16 window)
{
    __u32 room = nth_break(&flow->spaces, 0)->local - ack;
    __u32 field = (room + (1u << flow->snd_wscale) - 1) >> flow->snd_wscale;

    return (__s32) room >= 0 && field < window ? field : window;
}

/* Of a segment that has bytes, or a FIN: whether any of that lies behind the region. A FIN that
 * came to the last bytes before it is cut off, and sent again when its time has come. */
static __always_inline bool lies_behind(const struct flow *flow, const struct packet *p, __u32 end)
{
    __u32 local = nth_break(&flow->spaces, 0)->local;

    return is_before(local, end) || (p->flags & TH_FIN && !is_before(p->seq, local));
}

/* Whether a client that has room has got nothing for long, though its server has more to say. */
static __always_inline bool is_given_up(struct flow *flow, __u64 now)
{
    bool has_room = (__u32) flow->client_window << flow->snd_wscale >= flow->mss;

    if (!flow->idle_ns || !has_room || flow->idle_acked != flow->spaces.acked) {
        flow->idle_acked = flow->spaces.acked;
        flow->idle_ns = now;
    }
    /* `now` was taken before the lock: another core's may be later. */
    return (__s64) (now - flow->idle_ns) > IDLE_NS;
}

#endif
