//! The expansion: writes the function that the compiler sees.
//!
//! ```text
//! async fn pay(engine: &Engine, order: Order) -> Result<…> {
//!     let call = engine.function(scope).with_policy(…).with_errors(…).call(key, input);
//!     call.run(async move |attempt| -> Result<…> { the body }).await
//! }
//! ```

use std::time::Duration;

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens as _, quote, quote_spanned};
use syn::spanned::Spanned as _;
use syn::{
    Error, Expr, FnArg, GenericArgument, ItemFn, Pat, PathArguments, Result, ReturnType, Signature, Type,
    parse2,
};

use crate::options::{ComparedArguments, ErrorPolicy, KeySource, OnAbandoned, Options, RunMode, nearest};
use crate::template::{Piece, Template, root};

/// The most elements of a tuple that implements `Serialize`.
const MAX_TUPLE: usize = 16;

pub(crate) fn idempotent(attribute: TokenStream, item: TokenStream) -> Result<TokenStream> {
    let function: ItemFn = parse2(item.clone())
        .map_err(|_| Error::new(item_span(item), "`#[idempotent]` needs an `async fn` with a body"))?;
    check(&function.sig)?;
    let options: Options = parse2(attribute)?;
    let arguments = Arguments::of(&function.sig)?;
    let krate = options.krate.as_ref().map_or_else(|| quote!(::oncegate), |path| quote!(#path));
    let expansion = Expansion { options: &options, arguments: &arguments, krate: &krate };

    let engine = expansion.engine()?;
    let key = expansion.key()?;
    let input = expansion.input(engine.argument)?;
    let policy = expansion.policy();
    let with_caller =
        options.caller.as_ref().map(|caller| quote_spanned!(caller.span()=> .with_caller("caller", #caller)));
    let with_errors = expansion.errors();
    let attempt = options.attempt.as_ref().map_or_else(|| quote!(_), |name| quote!(#name));
    let returns = ReturnShape::of(&function.sig)?;
    let (body_type, convert) = (&returns.body, returns.convert);
    let borrowed_engine = arguments.borrowed_engine.as_ref();
    let run_mode = options.run_mode.unwrap_or(match owns_all(&function.sig, borrowed_engine) {
        true => RunMode::Detached,
        false => RunMode::InPlace,
    });
    // With the span of the return type, so that errors about missing traits point at that type.
    let run = if run_mode == RunMode::Detached { "run" } else { "run_in_place" };
    let run = Ident::new(run, returns.span);

    let ItemFn { attrs, vis, sig, block, .. } = &function;
    let (engine, scope) = (engine.expr, &options.scope);
    // A detached body cannot borrow the engine. It gets a reference to a clone, so its type stays the same.
    let (cloned, block) = match borrowed_engine.filter(|_| run_mode == RunMode::Detached) {
        Some(name) => (
            quote!(let __oncegate_engine = ::core::clone::Clone::clone(#name);),
            quote!({
                #[allow(unused_variables)]
                let #name = &__oncegate_engine;
                #block
            }),
        ),
        None => (TokenStream::new(), quote!(#block)),
    };
    Ok(quote! {
        #(#attrs)* #vis #sig {
            let __oncegate_call = (#engine).function(#scope) #policy #with_caller #with_errors.call(#key, #input);
            #cloned
            __oncegate_call
                .#run(async move |#attempt: #krate::engine::Attempt| -> #body_type #block)
                .await
                #convert
        }
    })
}

/// Returns `true` if the types of all arguments own their values, so that the body can outlive its caller.
///
/// A borrowed engine does not count, because it is cloned.
fn owns_all(sig: &Signature, borrowed_engine: Option<&Ident>) -> bool {
    let is_owned = |argument: &FnArg| match argument {
        // The macro does not see the fields of `Self`.
        FnArg::Receiver(_) => false,
        FnArg::Typed(typed) => {
            let is_engine = matches!(&*typed.pat, Pat::Ident(name) if Some(&name.ident) == borrowed_engine);
            is_engine || !may_borrow(&typed.ty.to_token_stream())
        }
    };
    sig.generics.params.is_empty() && sig.inputs.iter().all(is_owned)
}

/// Returns `true` if a type has a reference, a lifetime or a pointer, or if only its traits are known.
fn may_borrow(ty: &TokenStream) -> bool {
    ty.clone().into_iter().any(|token| match token {
        TokenTree::Punct(punct) => matches!(punct.as_char(), '&' | '\'' | '*'),
        TokenTree::Ident(name) => name == "impl" || name == "dyn" || name == "Self",
        TokenTree::Group(group) => may_borrow(&group.stream()),
        TokenTree::Literal(_) => false,
    })
}

fn item_span(item: TokenStream) -> Span {
    item.into_iter().next().map_or_else(Span::call_site, |token| token.span())
}

fn check(sig: &Signature) -> Result<()> {
    if sig.asyncness.is_none() && sig.generics.lifetimes().any(|of| of.lifetime.ident == "async_trait") {
        let message = "`#[async_trait]` has already rewritten this method: move the body into an `async fn` outside of the \
                       trait, put `#[idempotent]` on that function, and call it here";
        return Err(Error::new(sig.ident.span(), message));
    }
    if sig.asyncness.is_none() {
        let message = "an idempotent function must be an `async fn`: it waits for the store before and after its body runs";
        return Err(Error::new(sig.fn_token.span(), message));
    }
    if let Some(abi) = &sig.abi {
        return Err(Error::new(abi.span(), "an idempotent function must have the Rust ABI: remove `extern`"));
    }
    Ok(())
}

/// The names that the patterns of a function's arguments bind.
struct Arguments {
    names: Vec<Ident>,
    /// The names whose type is the engine.
    engines: Vec<Ident>,
    /// The single engine, if it is a reference.
    borrowed_engine: Option<Ident>,
    has_self: bool,
}

impl Arguments {
    fn of(sig: &Signature) -> Result<Self> {
        let mut all = Self {
            names: Vec::new(),
            engines: Vec::new(),
            borrowed_engine: None,
            has_self: sig.receiver().is_some(),
        };
        for argument in &sig.inputs {
            let FnArg::Typed(typed) = argument else { continue };
            let first = all.names.len();
            bound_names(&typed.pat, &mut all.names)?;
            if let [one] = &all.names[first..]
                && is_engine(&typed.ty)
            {
                let is_reference = matches!(&*typed.ty, Type::Reference(of) if of.mutability.is_none());
                let is_name = matches!(&*typed.pat, Pat::Ident(_));
                all.borrowed_engine = (is_reference && is_name).then(|| one.clone());
                all.engines.push(one.clone());
            }
        }
        all.borrowed_engine = all.borrowed_engine.filter(|_| all.engines.len() == 1);
        Ok(all)
    }

    /// Returns an error if a value begins with a name that is not an argument.
    fn check(&self, value: &Expr, span: Span) -> Result<()> {
        let Some(name) = root(value) else { return Ok(()) };
        if name == "self" {
            if self.has_self {
                return Ok(());
            }
            return Err(Error::new(span, "this function has no `self`"));
        }
        self.check_name(name, span)
    }

    fn check_name(&self, name: &Ident, span: Span) -> Result<()> {
        if self.names.contains(name) {
            return Ok(());
        }
        let names: Vec<_> = self.names.iter().map(ToString::to_string).collect();
        let hint = match nearest(&name.to_string(), names.iter().map(String::as_str)) {
            Some(near) => format!("did you mean `{near}`?"),
            None if names.is_empty() => "the function has none".to_owned(),
            None => format!("the arguments are: {}", names.join(", ")),
        };
        Err(Error::new(span, format!("there is no argument `{name}`; {hint}")))
    }
}

/// The names that a pattern binds.
fn bound_names(pattern: &Pat, names: &mut Vec<Ident>) -> Result<()> {
    match pattern {
        Pat::Ident(ident) => {
            names.push(ident.ident.clone());
            ident.subpat.as_ref().map_or(Ok(()), |(_, inner)| bound_names(inner, names))
        }
        Pat::TupleStruct(of) => of.elems.iter().try_for_each(|inner| bound_names(inner, names)),
        Pat::Tuple(of) => of.elems.iter().try_for_each(|inner| bound_names(inner, names)),
        Pat::Slice(of) => of.elems.iter().try_for_each(|inner| bound_names(inner, names)),
        Pat::Struct(of) => of.fields.iter().try_for_each(|field| bound_names(&field.pat, names)),
        Pat::Reference(of) => bound_names(&of.pat, names),
        Pat::Paren(of) => bound_names(&of.pat, names),
        Pat::Type(of) => bound_names(&of.pat, names),
        Pat::Wild(_) | Pat::Rest(_) => Ok(()),
        other => Err(Error::new(
            other.span(),
            "`#[idempotent]` does not support this pattern: bind the argument to a name",
        )),
    }
}

/// Returns `true` if a type is `Engine`, or wraps it as `&Engine`, `Arc<Engine>` or `State<Engine>` do.
fn is_engine(ty: &Type) -> bool {
    match ty {
        Type::Reference(reference) => is_engine(&reference.elem),
        Type::Paren(paren) => is_engine(&paren.elem),
        Type::Path(path) => path.path.segments.last().is_some_and(|last| match &last.arguments {
            PathArguments::None => last.ident == "Engine",
            PathArguments::AngleBracketed(of) => {
                let mut types = of.args.iter().filter_map(|argument| match argument {
                    GenericArgument::Type(ty) => Some(ty),
                    _ => None,
                });
                matches!((types.next(), types.next()), (Some(only), None) if is_engine(only))
            }
            PathArguments::Parenthesized(_) => false,
        }),
        _ => false,
    }
}

/// The input of the expansion: the attribute's options and the function's arguments.
struct Expansion<'a> {
    options: &'a Options,
    arguments: &'a Arguments,
    krate: &'a TokenStream,
}

/// The expression for the engine.
struct EngineSource<'a> {
    expr: TokenStream,
    /// The argument that it begins with, which is left out of the comparison.
    argument: Option<&'a Ident>,
}

impl Expansion<'_> {
    fn engine(&self) -> Result<EngineSource<'_>> {
        if let Some(expr) = &self.options.engine {
            self.arguments.check(expr, expr.span())?;
            let argument = match expr {
                Expr::Path(path) => path.path.get_ident(),
                Expr::Reference(reference) => root(&reference.expr),
                _ => None,
            };
            return Ok(EngineSource { expr: quote!(#expr), argument });
        }
        match &self.arguments.engines[..] {
            [argument] => Ok(EngineSource { expr: quote!(#argument), argument: Some(argument) }),
            [] => Err(Error::new(
                Span::call_site(),
                "no engine found: take an argument of type `&Engine`, or name one, for example `engine = self.engine`",
            )),
            [_, second, ..] => Err(Error::new(
                second.span(),
                "more than one argument is an `Engine`: choose one with `engine = …`",
            )),
        }
    }

    fn key(&self) -> Result<TokenStream> {
        let krate = self.krate;
        match &self.options.key {
            KeySource::Expr(expr) => Ok(quote!(#expr)),
            KeySource::Template(Template { pieces, span }) => {
                let mut calls = TokenStream::new();
                for piece in pieces {
                    calls.extend(match piece {
                        Piece::Text(text) => quote_spanned!(*span=> .text(#text)),
                        Piece::Value(value) => {
                            self.arguments.check(value, *span)?;
                            quote_spanned!(*span=> .value(&#value))
                        }
                    });
                }
                Ok(quote_spanned!(*span=> #krate::engine::KeyText::new("") #calls))
            }
        }
    }

    /// The compared values, as tuples of references.
    fn input(&self, engine: Option<&Ident>) -> Result<TokenStream> {
        let arguments = self.arguments;
        let of_names = |skipped: &dyn Fn(&Ident) -> bool| {
            let compared = arguments.names.iter().filter(|name| Some(*name) != engine && !skipped(name));
            compared.map(|name| self.compared(name.span(), &quote!(#name))).collect::<Vec<_>>()
        };
        let values = match &self.options.compared {
            ComparedArguments::All => of_names(&|_| false),
            ComparedArguments::AllBut(skip) => {
                skip.iter().try_for_each(|name| arguments.check_name(name, name.span()))?;
                of_names(&|name| skip.iter().any(|skipped| skipped == name))
            }
            ComparedArguments::Only(values) => {
                for value in values {
                    arguments.check(value, value.span())?;
                }
                values.iter().map(|value| self.compared(value.span(), &quote!(#value))).collect()
            }
        };
        if values.len() <= MAX_TUPLE {
            return Ok(quote!(&(#(#values,)*)));
        }
        let rows = values.chunks(MAX_TUPLE);
        Ok(quote!(&(#((#(#rows,)*),)*)))
    }

    /// One compared value. Its span makes an error about a missing trait point at the value.
    fn compared(&self, span: Span, value: &TokenStream) -> TokenStream {
        let krate = self.krate;
        quote_spanned!(span=> #krate::engine::compared(&#value))
    }

    fn policy(&self) -> Option<TokenStream> {
        let Options { retain, lease, wait, on_abandoned, policy, .. } = self.options;
        let krate = self.krate;
        let set = [("with_retention", retain), ("with_lease", lease), ("with_wait", wait)];
        let set: TokenStream = set
            .into_iter()
            .filter_map(|(method, value)| {
                let (method, millis) = (Ident::new(method, Span::call_site()), millis((*value)?));
                let duration = quote!(::core::time::Duration::from_millis(#millis));
                // Checked against its limits when the attribute was parsed, so the setter never refuses it.
                Some(quote!(let policy = policy.#method(#duration).unwrap_or(policy);))
            })
            .collect();
        let on_abandoned = on_abandoned.map(|on_abandoned| {
            let which = match on_abandoned {
                OnAbandoned::Park => quote!(Park),
                OnAbandoned::Reexecute => quote!(Reexecute),
            };
            quote!(let policy = policy.with_on_abandoned(#krate::core::OnAbandoned::#which);)
        });
        if policy.is_none() && set.is_empty() && on_abandoned.is_none() {
            return None;
        }
        let base = policy
            .as_ref()
            .map_or_else(|| quote!(::core::default::Default::default()), |policy| quote!(#policy));
        Some(quote!(.with_policy({ let policy: #krate::engine::Policy = #base; #set #on_abandoned policy })))
    }

    fn errors(&self) -> Option<TokenStream> {
        let krate = self.krate;
        let policy = match &self.options.errors {
            ErrorPolicy::Unknown => return None,
            ErrorPolicy::Keep => quote!(|_: &_| #krate::engine::ErrorFate::Keep),
            ErrorPolicy::Release => quote!(#krate::engine::ReleaseIf(|_: &_| true)),
            ErrorPolicy::Custom(policy) => quote!(#policy),
        };
        Some(quote!(.with_errors(#policy)))
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The return type of the body, and its conversion to that of the function.
struct ReturnShape {
    span: Span,
    body: TokenStream,
    convert: TokenStream,
}

impl ReturnShape {
    fn of(sig: &Signature) -> Result<Self> {
        const NOT_A_RESULT: &str = "an idempotent function must return a `Result`, because some calls get no value: \
             `Result<T, FunctionError<E>>`, or `Result<T, E>` where `E: From<FunctionError<E>>`";
        let ty = match &sig.output {
            ReturnType::Type(_, ty) => ty,
            ReturnType::Default => return Err(Error::new(sig.ident.span(), NOT_A_RESULT)),
        };
        let Type::Path(path) = &**ty else { return Err(Error::new(ty.span(), NOT_A_RESULT)) };
        let mut body = path.clone();
        if let Some(last) = body.path.segments.last_mut()
            && let PathArguments::AngleBracketed(arguments) = &mut last.arguments
            && let Some(GenericArgument::Type(error)) = arguments.args.last_mut()
            && let Some(inner) = inside_function_error(error)
        {
            *error = inner;
            return Ok(Self { span: ty.span(), body: quote!(#body), convert: TokenStream::new() });
        }
        let convert = quote_spanned!(ty.span()=> .map_err(::core::convert::From::from));
        Ok(Self { span: ty.span(), body: quote!(#ty), convert })
    }
}

/// Returns the `E` of a `FunctionError<E>`.
fn inside_function_error(ty: &Type) -> Option<Type> {
    let Type::Path(path) = ty else { return None };
    let last = path.path.segments.last().filter(|last| last.ident == "FunctionError")?;
    let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
    match arguments.args.first() {
        Some(GenericArgument::Type(inner)) if arguments.args.len() == 1 => Some(inner.clone()),
        _ => None,
    }
}
