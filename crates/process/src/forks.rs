//! Forks. The library's locks are held during a fork, so that the child finds no state in the middle of a change. The
//! child then forgets the state that is its parent's.

use std::cell::RefCell;
use std::collections::BTreeSet;

use shunt_sys::locked;

use crate::bypass::{self, Handings, rescue};
use crate::connections::runtime::runtime;
use crate::memory;
use crate::store;
use crate::system::inside::{Held, Inside};
use crate::system::{counts, process};
use crate::tls;

/// Locks that are held during a fork: no thread of the parent is changing anything that the child uses.
struct Still {
    _keys: locked::Still,
    rescues: Held<'static, BTreeSet<u64>>,
    memory: memory::Still,
    store: store::Still<'static>,
    bypass: Held<'static, Handings>,
    _tls: Held<'static, ()>,
    _connections: Held<'static, ()>,
    _inside: Option<Inside>,
}

thread_local! {
    static STILL: RefCell<Option<Still>> = const { RefCell::new(None) };
}

pub fn before() {
    if let Some(runtime) = runtime() {
        let _inside = Inside::enter();
        // This comes before the locks are taken: other threads may need them while this thread waits for the store that
        // has absent bytes.
        runtime.memory.fetch_for_fork();
        let _connections = runtime.connections.hold_still();
        let (_tls, bypass, store) = (tls::hold_still(), bypass::hold_still(), runtime.store.hold_still());
        let memory = runtime.memory.hold_still();
        let (rescues, _keys) = (rescue::hold_still(), locked::hold_still());
        STILL.set(Some(Still { _keys, rescues, memory, store, bypass, _tls, _connections, _inside }));
    }
}

pub fn after_in_parent() {
    STILL.set(None);
}

pub fn after_in_child() {
    let still = STILL.take();
    if let Some(mut still) = still {
        process::begin();
        counts::after_fork();
        still.memory.forget();
        still.store.forget();
        still.bypass.forget();
        rescue::forget(&mut still.rescues);
    }
}
