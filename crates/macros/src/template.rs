//! The key's template: text, and values in braces.

use proc_macro2::Span;
use syn::{Error, Expr, LitStr, Member, Result};

/// Text and values in turn.
pub(crate) struct Template {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) span: Span,
}

pub(crate) enum Piece {
    Text(String),
    Value(Box<Expr>),
}

impl Template {
    /// Reads `order-{order.id}`. Braces that mean themselves are doubled.
    pub(crate) fn read(literal: &LitStr) -> Result<Self> {
        let (text, span) = (literal.value(), literal.span());
        let fault = |what: &str| Error::new(span, format!("the key {text:?} {what}"));
        let mut pieces = Vec::new();
        let mut plain = String::new();
        let mut rest = text.as_str();
        while let Some(at) = rest.find(['{', '}']) {
            let (before, from) = rest.split_at(at);
            plain.push_str(before);
            if let Some(after) = from.strip_prefix("{{") {
                plain.push('{');
                rest = after;
            } else if let Some(after) = from.strip_prefix("}}") {
                plain.push('}');
                rest = after;
            } else if let Some((inside, after)) = from.strip_prefix('{').and_then(|from| from.split_once('}'))
            {
                if !plain.is_empty() {
                    pieces.push(Piece::Text(std::mem::take(&mut plain)));
                }
                pieces.push(Piece::Value(Box::new(value(inside, span)?)));
                rest = after;
            } else {
                return Err(fault("has a brace without its other half; one that means itself is doubled"));
            }
        }
        plain.push_str(rest);
        if !pieces.iter().any(|piece| matches!(piece, Piece::Value(_))) {
            return Err(fault(
                "has no value in it, and every call would be the same one: put an argument in braces, or give an \
                 expression without quotes",
            ));
        }
        if !plain.is_empty() {
            pieces.push(Piece::Text(plain));
        }
        Ok(Self { pieces, span })
    }
}

/// What stands in braces: an argument, or something of it.
fn value(inside: &str, span: Span) -> Result<Expr> {
    let fault = |what: String| Error::new(span, what);
    if inside.trim().is_empty() {
        return Err(fault("a value in the key has no name: write an argument between the braces".to_owned()));
    }
    if inside.contains(':') && !inside.contains("::") {
        return Err(fault(format!(
            "`{{{inside}}}` has a format: in a key there is none, a value is written as it is displayed"
        )));
    }
    // Its span is that of the whole literal, whose inside cannot be pointed at.
    let value = LitStr::new(inside, span)
        .parse::<Expr>()
        .map_err(|error| fault(format!("`{{{inside}}}` is not a value: {error}")))?;
    if root(&value).is_none() {
        return Err(fault(format!(
            "`{{{inside}}}` is not an argument, a field of one or what a method of one gives"
        )));
    }
    Ok(value)
}

/// The name that a chain of fields and methods begins with.
pub(crate) fn root(value: &Expr) -> Option<&syn::Ident> {
    match value {
        Expr::Path(path) if path.qself.is_none() => path.path.get_ident(),
        Expr::Field(field) => match &field.member {
            Member::Named(_) | Member::Unnamed(_) => root(&field.base),
        },
        Expr::MethodCall(call) if call.args.is_empty() => root(&call.receiver),
        Expr::Reference(reference) => root(&reference.expr),
        Expr::Paren(paren) => root(&paren.expr),
        _ => None,
    }
}
