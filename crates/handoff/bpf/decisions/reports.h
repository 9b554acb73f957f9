/* SPDX-License-Identifier: (MIT OR GPL-2.0) */
/*
 * Reports of a smaller path MTU (../icmp.h) as they arrive at the frontend. A report cites the
 * packet that was too long:
 *
 *   the first byte of the cited packet lies       the report goes
 *   in the active region, and is outstanding      to the region's backend
 *   in the newest payload, not outstanding        nowhere: it is late, or made up
 *   elsewhere, for instance in the header         to the frontend's stack, in LOCAL numbers
 *
 * A byte is outstanding if the client has not acknowledged it, and has room for it. A stranger who
 * knows a flow's addresses has to guess the number of such a byte, as on any connection. A flow is
 * a client connection. A region is a range of its sequence numbers that a backend sends. A region
 * is active until it is complete or cancelled. LOCAL numbers are those of the frontend's kernel.
 */
#ifndef REPORTS_H
#define REPORTS_H

#include "../steering.h"
#include "claims.h"
#include "numbers.h"
#include "spaces.h"

enum cites { SERVERS_BYTE, OUTSTANDING_PAYLOAD, OTHER_PAYLOAD };

/* Returns where the cited packet lies, by its sequence number. Under the flow's lock. */
static __always_inline enum cites cites(const struct flow *flow, __u32 seq)
{
    const struct spaces *s = &flow->spaces;
    __s64 at = nth_position(s, 0, seq);

    if (at < 0 || at >= (__s64) nth_break(s, 0)->length)
        return SERVERS_BYTE;
    bool outstanding = s->status == SHUNT_REGION_ACTIVE && at >= (__s64) s->acked &&
                       is_before(seq, client_edge(flow));
    return outstanding ? OUTSTANDING_PAYLOAD : OTHER_PAYLOAD;
}

#endif
