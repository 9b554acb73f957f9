//! Coroutines of Boost.Asio. Each reads on a separate stack, and the kernel is not told when the stack is switched.
//! chains.rs tests coroutines in Python (greenlets), by gunicorn's gevent worker.

use shunt_odb::store::Limits;

use crate::actors::{Actors, built, fortified, seeds};
use crate::bed::Bed;

#[test]
fn bytes_pass_through_coroutines_as_they_would_without() {
    let bed = Bed::of(3, Limits::default());
    let libraries = ["-Wl,--no-as-needed", "-lboost_coroutine", "-lboost_context"];
    let relay = built(&bed.path(), "asio.cpp", "asio", "g++", &[&["-O1", "-pthread"], &libraries[..]].concat());
    let actors = Actors { bed: &bed, end: &fortified(&bed.path()), relay: &relay };
    for seed in seeds(3) {
        actors.converse_in_all_ways(seed);
    }
}
