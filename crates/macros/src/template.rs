//! The template of a key: text, and values in braces.

use proc_macro2::Span;
use syn::{Error, Expr, LitStr, Member, Result};

/// The parsed template: text and values in their order.
pub(crate) struct Template {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) span: Span,
}

pub(crate) enum Piece {
    Text(String),
    Value(Box<Expr>),
}

impl Template {
    /// Parses a template such as `order-{order.id}`. A literal brace is doubled.
    pub(crate) fn read(literal: &LitStr) -> Result<Self> {
        let (text, span) = (literal.value(), literal.span());
        let fault = |problem: &str| Error::new(span, format!("the key {text:?} {problem}"));
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
                return Err(fault("has an unmatched brace: write `{{` or `}}` for a literal one"));
            }
        }
        plain.push_str(rest);
        if !pieces.iter().any(|piece| matches!(piece, Piece::Value(_))) {
            return Err(fault(
                "contains no value, so all calls would have the same key: put an argument in braces, or write an \
                 expression without quotes",
            ));
        }
        if !plain.is_empty() {
            pieces.push(Piece::Text(plain));
        }
        Ok(Self { pieces, span })
    }
}

/// Parses the text between braces: an argument, or a field or method of one.
fn value(inside: &str, span: Span) -> Result<Expr> {
    let fault = |message: String| Error::new(span, message);
    if inside.trim().is_empty() {
        return Err(fault("the key has empty braces: write an argument between them".to_owned()));
    }
    if inside.contains(':') && !inside.contains("::") {
        return Err(fault(format!(
            "`{{{inside}}}` has a format, which a key does not support: a value is written with `Display`"
        )));
    }
    // The value gets the span of the whole literal, because a span cannot point inside a literal.
    let value = LitStr::new(inside, span)
        .parse::<Expr>()
        .map_err(|error| fault(format!("`{{{inside}}}` is not a valid expression: {error}")))?;
    if root(&value).is_none() {
        return Err(fault(format!(
            "`{{{inside}}}` is not an argument, a field of one, or a call of a method without arguments"
        )));
    }
    Ok(value)
}

/// Returns the name that a chain of fields and methods begins with.
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
