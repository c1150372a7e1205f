// Before anything is drawn: the choice of light or dark that was made last time; none follows the system.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  /* storage may be switched off */
}
