//! The text of an error in logs and reports.

use std::error::Error;
use std::fmt;

/// An error with its causes in one line: `cannot open orders.db: permission denied`.
///
/// The errors of Oncegate display themselves only; the cause of an error is its [`source`](Error::source). Everything that
/// logs or prints an error uses this type, and so can a program that uses Oncegate.
///
/// A cause is left out if the text before it ends with the text of the cause, because errors of some libraries repeat
/// their cause. At most 32 causes are shown.
///
/// ```
/// use oncegate_core::{ErrorChain, StoreError};
///
/// let full = std::io::Error::other("no space left on device");
/// let error = StoreError::unavailable("the record was not written").with_source(full);
/// assert_eq!(error.to_string(), "the record was not written");
/// assert_eq!(ErrorChain(&error).to_string(), "the record was not written: no space left on device");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ErrorChain<'a>(pub &'a (dyn Error + 'a));

/// An error may be its own source.
const MAX_CAUSES: usize = 32;

impl fmt::Display for ErrorChain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.0.to_string();
        let mut cause = self.0.source();
        for _ in 0..MAX_CAUSES {
            let Some(error) = cause else { break };
            let words = error.to_string();
            if !text.ends_with(&words) {
                text.push_str(": ");
                text.push_str(&words);
            }
            cause = error.source();
        }
        f.write_str(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Link(&'static str, Option<Box<Link>>);

    impl Link {
        fn of(texts: &[&'static str]) -> Option<Box<Self>> {
            let (text, causes) = texts.split_first()?;
            Some(Box::new(Self(text, Self::of(causes))))
        }
    }

    impl fmt::Display for Link {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Link {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|cause| cause as &dyn Error)
        }
    }

    #[test]
    fn each_cause_is_shown_once() {
        for (texts, chain) in [
            (&["not paid"][..], "not paid"),
            (&["not paid", "no such account"], "not paid: no such account"),
            (&["not paid", "refused", "no such account"], "not paid: refused: no such account"),
            (&["not paid: refused", "refused"], "not paid: refused"),
            (&["not paid: refused: closed", "refused: closed", "closed"], "not paid: refused: closed"),
            (&["not paid", "refused: closed", "closed"], "not paid: refused: closed"),
            (&["not paid", "", "closed"], "not paid: closed"),
        ] {
            let error = Link::of(texts).unwrap();
            assert_eq!(ErrorChain(&*error).to_string(), chain, "{texts:?}");
        }
    }

    #[test]
    fn an_error_that_is_its_own_source_has_an_end() {
        #[derive(Debug)]
        struct Circle(std::sync::atomic::AtomicU32);

        impl fmt::Display for Circle {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "turn {}", self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
            }
        }

        impl Error for Circle {
            fn source(&self) -> Option<&(dyn Error + 'static)> {
                CIRCLE.get().map(|circle| circle as &dyn Error)
            }
        }

        static CIRCLE: std::sync::OnceLock<Circle> = std::sync::OnceLock::new();
        let circle = CIRCLE.get_or_init(|| Circle(std::sync::atomic::AtomicU32::new(0)));
        let chain = ErrorChain(circle).to_string();
        assert_eq!(chain.matches("turn ").count(), MAX_CAUSES + 1, "{chain}");
    }
}
