//! The virtual clock, and the events that are still to come.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use slab::Slab;

/// Events in the order of their times. Events of the same time are in the order in which they were added.
pub struct Schedule<E> {
    now: u64,
    made: u64,
    /// For each event: its time in nanoseconds, its number, and its place in `events`. Events are large, and a heap
    /// moves its entries often, so the events are kept outside the heap.
    heap: BinaryHeap<Reverse<(u64, u64, usize)>>,
    events: Slab<E>,
}

impl<E> Default for Schedule<E> {
    fn default() -> Self {
        Self { now: 0, made: 0, heap: BinaryHeap::new(), events: Slab::new() }
    }
}

impl<E> Schedule<E> {
    /// Returns the virtual time.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.now)
    }

    /// Adds an event that happens `delay` from now.
    pub fn after(&mut self, delay: Duration, event: E) {
        self.made += 1;
        self.heap.push(Reverse((self.now + delay.as_nanos() as u64, self.made, self.events.insert(event))));
    }

    /// Takes the next event, if it comes at `end` or earlier. Sets the clock to the event's time.
    pub fn next(&mut self, end: Duration) -> Option<E> {
        let Reverse((at, ..)) = *self.heap.peek()?;
        if at > end.as_nanos() as u64 {
            return None;
        }
        let Reverse((at, _, place)) = self.heap.pop()?;
        self.now = at;
        Some(self.events.remove(place))
    }

    /// Sets the clock to `time`, before which no event may be left. A time in the past changes nothing.
    pub fn wait_until(&mut self, time: Duration) {
        self.now = self.now.max(time.as_nanos() as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_their_order() {
        let mut schedule = Schedule::default();
        for (delay, event) in [(3, 'c'), (1, 'a'), (1, 'b'), (9, 'd')] {
            schedule.after(Duration::from_secs(delay), event);
        }
        let end = Duration::from_secs(5);
        let order: Vec<char> = std::iter::from_fn(|| schedule.next(end)).collect();
        assert_eq!((order, schedule.now()), (vec!['a', 'b', 'c'], Duration::from_secs(3)));
    }
}
