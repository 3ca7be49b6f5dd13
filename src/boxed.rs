//! Boxes for the large futures of a request.

use std::pin::Pin;

/// Box the future that `make` returns.
///
/// `Box::pin(future)` constructs the future on the stack and copies all its bytes into the box, although most of them
/// have no value before the first poll. Here the box exists first, so that the compiler constructs the future in it.
#[inline]
pub(crate) fn boxed<F>(make: impl FnOnce() -> F) -> Pin<Box<F>> {
    let place = Box::new_uninit();
    Box::into_pin(Box::write(place, make()))
}
