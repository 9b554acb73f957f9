//! Tables of the daemon's sockets and files. The logic (crates/logic) chooses the index of each.

/// Table with at most one thing for each index.
#[derive(Debug)]
pub(crate) struct Slots<T>(Vec<Option<T>>);

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Slots<T> {
    /// Puts a thing at an index, and drops what was there.
    pub(crate) fn insert(&mut self, index: usize, thing: T) {
        if self.0.len() <= index {
            self.0.resize_with(index + 1, || None);
        }
        self.0[index] = Some(thing);
    }

    /// Takes the thing at an index out, and returns it.
    pub(crate) fn remove(&mut self, index: usize) -> Option<T> {
        self.0.get_mut(index)?.take()
    }

    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        self.0.get(index)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.0.get_mut(index)?.as_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.0.iter().enumerate().filter_map(|(index, thing)| Some((index, thing.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thing_is_where_it_was_put_until_it_is_taken_out() {
        let mut slots = Slots::default();
        slots.insert(2, 'a');
        assert_eq!((slots.get(1), slots.get(2), slots.get(9)), (None, Some(&'a'), None));
        *slots.get_mut(2).unwrap() = 'b';
        slots.insert(0, 'c');
        assert_eq!(slots.iter().map(|(index, thing)| (index, *thing)).collect::<Vec<_>>(), [(0, 'c'), (2, 'b')]);
        assert_eq!((slots.remove(2), slots.remove(2), slots.remove(9)), (Some('b'), None, None));
    }
}
