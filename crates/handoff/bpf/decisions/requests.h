/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Changes to a flow that an agent asks for (../requests.h). All run under the flow's lock. A flow
 * is the record of a client connection in the map `flows`. A region is a range of its sequence
 * numbers that a backend sends, for one handoff.
 */
#ifndef DECISIONS_REQUESTS_H
#define DECISIONS_REQUESTS_H

#include "../../../../include/shunt.h"
#include "../steering.h"
#include "arrivals.h"
#include "claims.h"
#include "numbers.h"
#include "spaces.h"

/* Notes how many payload bytes may lie between the ACKs that a backend gets. Returns false if this
 * backend does not send the newest region. */
static __always_inline bool space_acks(struct flow *flow, __u32 peer, __u32 bytes)
{
    bool its_own = flow->spaces.made && nth_break(&flow->spaces, 0)->peer == peer;

    if (its_own)
        flow->ack_spacing = bytes;
    return its_own;
}

/* Notes a backend's confirmation that its socket has got the ACK of a region's end. Returns false
 * if the region of that handoff is not active, or another backend sends it. */
static __always_inline bool deliver(struct flow *flow, __u32 peer, __u64 handoff, struct route *r)
{
    struct flow_break *b = newest_break(&flow->spaces);

    if (!flow->spaces.made || flow->spaces.status != SHUNT_REGION_ACTIVE ||
        flow->handoff != handoff || b->peer != peer)
        return false;
    b->end |= END_DELIVERED;
    if (is_delivered(b)) {
        flow->spaces.acked = b->length;
        end_region(flow, r, SHUNT_REGION_COMPLETE, SHUNT_EVENT_COMPLETE);
    }
    return true;
}

/* Cancels a handoff's region, which nobody sends any more. Returns false if that region is not
 * active. */
static __always_inline bool cancel_handoff(struct flow *flow, __u64 handoff)
{
    bool is_its_own = flow->handoff == handoff && flow->spaces.status == SHUNT_REGION_ACTIVE;

    if (is_its_own)
        flow->spaces.status = SHUNT_REGION_CANCELLED;
    return is_its_own;
}

#endif
